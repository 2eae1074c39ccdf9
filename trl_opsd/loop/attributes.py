"""What assigning to an attribute of TRL's trainer does once the trainer is built: it works, or it is an error.

Most of TRL's attributes are read once, at construction; to assign one later would change nothing, silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import Divergence, ForwardKL, GeneralizedJSD, ReverseKL
from trl_opsd.losses.registry import divergence_of
from trl_opsd.run.ranges import above, in_range

__all__ = ["FIXED", "Attributes"]

_OPTION = "set it in `OPSDConfig` and build the trainer again"
_SAMPLING = "assign to that of `trainer.generation_config`, or set it in `OPSDConfig` and build the trainer again"
_NO_LABELS = "there are no labels to compute it from; `trainer.record` and `compare` are called for each batch"

FIXED: Mapping[str, str] = MappingProxyType(
    {
        "top_p": _SAMPLING,
        "top_k": _SAMPLING,
        "min_p": _SAMPLING,
        "repetition_penalty": _SAMPLING,
        "generation_kwargs": "assign to the attributes of `trainer.generation_config`",
        "max_completion_length": f"{_OPTION}, or assign less to `trainer.generation_config.max_new_tokens`",
        "eos_token_ids": "set `model.generation_config.eos_token_id` before the trainer is built",
        "tools": "pass `tools` when the trainer is built",
        "use_vllm": _OPTION,
        "vllm_mode": _OPTION,
        "compute_metrics": _NO_LABELS,
        "preprocess_logits_for_metrics": _NO_LABELS,
        "compute_loss_func": "the loss is `trainer.divergence`; assign to that",
    }
)
"""Attributes that are read at construction only, and what to do instead of assigning to them."""


class Attributes(DistillationTrainer):
    """A trainer whose attributes can be assigned to, or say why not.

    Attributes:
        is_built (`bool`): whether construction has ended; until then TRL assigns.
    """

    args: OPSDConfig
    divergence: Divergence
    teacher: Any = None
    is_built: bool = False
    _hides_engine: bool = False
    """Whether TRL's tool loop is running, which would ask an engine of TRL's for its context."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and self.is_built:
            now = getattr(self, name, None)
            if value is not now and value != now:
                raise AttributeError(
                    f"`trainer.{name} = {value!r}` would have no effect: it is {now!r} since the trainer was built. "
                    f"Instead, {FIXED[name]}.",
                    name=name,
                    obj=self,
                )
        super().__setattr__(name, value)

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
        in_range("beta", beta, 0.0, 1.0)
        self.divergence = divergence_of(None, beta)

    @property
    def temperature(self) -> float:
        """Softmax temperature of the loss, for both models; rollouts have that of `generation_config`, as in TRL."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        above("temperature", temperature, 0.0)
        self._temperature = temperature

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
