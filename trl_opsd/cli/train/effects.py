"""Finds options of a training script that are set but have no effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from accelerate.logging import get_logger

from trl_opsd._compat.trl import ModelConfig
from trl_opsd.cli.train.options import Given

logger = get_logger(__name__)

_DATA = ("dataset_name", "dataset_config", "dataset_streaming")
_MIXTURE = ("datasets", "streaming", "test_split_size")
_LORA = (*(one.name for one in fields(ModelConfig) if one.name.startswith("lora_")), "use_rslora", "use_dora")
_4_BIT = ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant")
_OF_TEACHER = ("teacher_dtype", "teacher_attn_implementation")


def warn_of_options(given: Given) -> None:
    """Warns of options of the script that have no effect; `OPSDTrainer` does so for those of its config."""
    extra, script, config, model, mixture = given.extra, given.script, given.config, given.model, given.mixture
    unread: list[tuple[Any, Sequence[str], str]] = [(script, ["ignore_bias_buffers"], "this trainer has no use for it")]
    if not model.use_peft:
        unread.append((model, _LORA, "`use_peft` is not set"))
    if not model.load_in_4bit:
        unread.append((model, _4_BIT, "`load_in_4bit` is not set"))
    if config.teacher_model_kind is not None:
        unread.append((extra, _OF_TEACHER, "the student is its own teacher"))
    if config.eval_strategy == "no":
        unread.append((script, ["dataset_test_split"], "`eval_strategy` is not set"))
    if given.task:
        unread += [
            (group, names, "the task has a dataset of its own")
            for group, names in ((script, _DATA), (mixture, _MIXTURE))
        ]
    elif mixture.datasets:
        unread.append((script, _DATA, "`datasets` is loaded"))
    found = [
        f"`{name}={getattr(group, name)!r}`, because {reason}"
        for group, names, reason in unread
        for name in names
        if getattr(group, name) != getattr(type(group), name, [])  # a list has its default in a factory
    ]
    if found:
        logger.warning(f"Options without effect: {'; '.join(found)}.")
