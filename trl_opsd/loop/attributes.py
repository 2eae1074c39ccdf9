"""What assigning to an attribute does once the trainer is built: it works, or it is an error.

Most of TRL's attributes are read once, at construction; to assign one later would change nothing, silently. So would an
attribute that is called like an option, or almost like an attribute that exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL
from trl_opsd.losses.registry import Settings, divergence_of
from trl_opsd.options.changes import ReadOnce
from trl_opsd.options.foreign_names import TRAINER_ARGUMENTS, without_meaning
from trl_opsd.options.table import above, from_to

__all__ = ["FIXED", "Attributes"]

_OPTION = "set it in `OPSDConfig` and build the trainer again"
_SAMPLING = "assign to that of `trainer.generation_config`, or set it in `OPSDConfig` and build the trainer again"
_NO_LABELS = "there are no labels to compute it from; override `compare` or `weigh`, and log numbers with `self.record`"

FIXED: Mapping[str, str] = MappingProxyType(
    {
        "top_p": _SAMPLING,
        "top_k": _SAMPLING,
        "min_p": _SAMPLING,
        "repetition_penalty": _SAMPLING,
        "generation_kwargs": "assign to the attributes of `trainer.generation_config`",
        "generation_config": "assign to its attributes",
        "max_completion_length": f"{_OPTION}, or assign less to `trainer.generation_config.max_new_tokens`",
        "eos_token_ids": "set `model.generation_config.eos_token_id` before the trainer is built",
        "tools": "pass `tools` when the trainer is built",
        "processing_class": "pass `processing_class` when the trainer is built",
        "teacher": "assign to `trainer.teacher_model`",
        "teachers": "assign to `trainer.teacher_model`, or pass several when the trainer is built",
        "use_vllm": _OPTION,
        "vllm_mode": _OPTION,
        "compute_metrics": _NO_LABELS,
        "preprocess_logits_for_metrics": _NO_LABELS,
        "compute_loss_func": "the loss is `trainer.divergence`; assign to that",
    }
)
"""Attributes that are read at construction only, and what to do instead of assigning to them."""

DATASETS = ("train_dataset", "eval_dataset")
"""Attributes whose values are checked as those of the arguments are."""


class Attributes(DistillationTrainer):
    """A trainer whose attributes can be assigned to, or say why not.

    Attributes:
        is_built (`bool`): whether construction has ended; until then TRL assigns.
    """

    args: OPSDConfig
    divergence: Divergence
    teacher: Any = None
    is_built: bool = False
    _read_once: ReadOnce
    _hides_engine: bool = False
    """Whether TRL's tool loop is running, which would ask an engine of TRL's for its context."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.is_built:
            return super().__setattr__(name, value)
        if name in DATASETS:
            if value is not getattr(self, name):
                self.replace_dataset(name, value)
            return None
        if wrong := self._without_effect_on(name, value):
            raise AttributeError(
                f"`trainer.{name} = {_shown(value)}` would have no effect: {wrong}", name=name, obj=self
            )
        return super().__setattr__(name, value)

    def _without_effect_on(self, name: str, value: Any) -> str | None:
        """Why assigning this would have no effect, and what to do; `None` where it has one, or is the user's own."""
        if name in FIXED:
            now = getattr(self, name, None)
            same = value is now or value == now
            return None if same else f"it is {_shown(now)} since the trainer was built. Instead, {FIXED[name]}."
        another = "An attribute of your own needs another name."
        if inspect.isroutine(getattr(type(self), name, None)) and not callable(value):
            return f"it is a method. {another}"
        if name.startswith("_") or name in vars(self) or hasattr(type(self), name):
            return None
        options = {one.name for one in fields(self.args)}
        if name in options and value == getattr(self.args, name):
            return None  # a copy, in a subclass
        if name in self._read_once.names:
            return f"it is an option that was read at construction: build the trainer with that value. {another}"
        if name in options:
            return f"it is an option: assign to `trainer.args.{name}`, or build the trainer with that value. {another}"
        if name in TRAINER_ARGUMENTS:
            return f"it is an argument: pass `{name}` when the trainer is built. {another}"
        why = without_meaning(name, type(self.args), {*vars(self), *dir(type(self)), *options})
        return f"{why}. {another}" if why else None

    def replace_dataset(self, name: str, dataset: Any) -> None:
        """Checks other rows as the first were, and takes them; the implementation of assigning to a dataset."""
        raise NotImplementedError

    def replace_teacher(self, teacher_model: Any) -> None:
        """Builds the teacher anew from another model or path; the implementation of assigning to `teacher_model`."""
        raise NotImplementedError

    @property
    def teacher_model(self) -> Any:
        """The model of the only teacher. Another model or path can be assigned, between two optimizer steps."""
        return getattr(self.teacher, "model", None)

    @teacher_model.setter
    def teacher_model(self, teacher_model: Any) -> None:
        # While it builds the student, TRL assigns None.
        if self.is_built and teacher_model is not self.teacher_model:
            self.replace_teacher(teacher_model)

    @property
    def beta(self) -> float | None:
        """TRL's number for the divergence, `None` where it has none; assigning to it sets the divergence."""
        match self.divergence:
            case ForwardKL():
                return 0.0
            case ReverseKL():
                return 1.0
            case GeneralizedJSD(beta=beta):
                return beta
        return None

    @beta.setter
    def beta(self, beta: float) -> None:
        from_to(0, 1).check("beta", beta)
        self.divergence = divergence_of(None, Settings(beta=beta))

    @property
    def temperature(self) -> float:
        """Softmax temperature of the loss, for models without an option of their own; rollouts have that of
        `generation_config`, as in TRL.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        above(0).check("temperature", temperature)
        self._temperature = temperature

    @property
    def temperatures(self) -> tuple[float, float]:
        """Softmax temperatures of the student and of the teacher in the loss."""
        student, teacher = self.args.student_temperature, self.args.teacher_temperature
        return student or self.temperature, teacher or self.temperature

    @property
    def use_vllm(self) -> bool:
        """Whether vLLM generates."""
        return self.args.use_vllm and not self._hides_engine

    @use_vllm.setter
    def use_vllm(self, use_vllm: bool) -> None:
        """Ignores what TRL assigns, whose value is hidden from it."""

    @property
    def vllm_generation(self) -> Any:
        raise AttributeError(
            "`trainer.vllm_generation` is TRL's engine, which is not built here: with `use_vllm=True` the engine is "
            "behind `trainer.rollout`, whose `sync_weights` and `close` are public.",
            name="vllm_generation",
            obj=self,
        )


def _shown(value: Any) -> str:
    """A value in a message: a tokenizer's would fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
