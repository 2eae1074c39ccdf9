"""What assigning to an attribute does once the trainer is built: it works, or it is an error.

Most of TRL's attributes are read once, at construction; to assign one later would change nothing, silently. So would an
attribute that is called like an option, or almost like an attribute that exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from trl_opsd.options.foreign_names import TRAINER_ARGUMENTS, without_meaning

__all__ = ["DATASETS", "FIXED", "shown", "why_no_effect"]

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


def why_no_effect(trainer: Any, name: str, value: Any, read_once: Collection[str]) -> str | None:
    """Why assigning this would have no effect, and what to do; `None` where it has one, or is the user's own.

    `read_once` are the options that were read at construction.
    """
    if name in FIXED:
        now = getattr(trainer, name, None)
        same = value is now or value == now
        return None if same else f"it is {shown(now)} since the trainer was built. Instead, {FIXED[name]}."
    another = "An attribute of your own needs another name."
    if inspect.isroutine(getattr(type(trainer), name, None)) and not callable(value):
        return f"it is a method. {another}"
    if name.startswith("_") or name in vars(trainer) or hasattr(type(trainer), name):
        return None
    options = {one.name for one in fields(trainer.args)}
    if name in options and value == getattr(trainer.args, name):
        return None  # a copy, in a subclass
    if name in read_once:
        return f"it is an option that was read at construction: build the trainer with that value. {another}"
    if name in options:
        return f"it is an option: assign to `trainer.args.{name}`, or build the trainer with that value. {another}"
    if name in TRAINER_ARGUMENTS:
        return f"it is an argument: pass `{name}` when the trainer is built. {another}"
    why = without_meaning(name, type(trainer.args), {*vars(trainer), *dir(type(trainer)), *options})
    return f"{why}. {another}" if why else None


def shown(value: Any) -> str:
    """A value in a message: a tokenizer's would fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
