"""Refuses a student of which no weight would be stepped; knows its parameters and its optimizer, but no options."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn

from trl_opsd._compat.peft import is_merged, is_peft

logger = get_logger(__name__)


def check_can_learn(student: nn.Module) -> None:
    """Refuses a student that cannot learn: frozen, with a merged adapter, or without gradients."""
    if not torch.is_grad_enabled():
        raise ValueError("Gradients are switched off by `torch.no_grad` or `inference_mode`: train outside of it.")
    if is_peft(student) and is_merged(student):
        raise ValueError(
            "The student's adapter is merged into its base, so that nothing would be learned: call `unmerge_adapter()` "
            "on the model."
        )
    if any(one.requires_grad for one in student.parameters()):
        return
    remedy = (
        "load the adapter with `PeftModel.from_pretrained(..., is_trainable=True)`, leave `inference_mode=True` out of "
        "its config, or enable it again"
        if is_peft(student)
        else "call `model.requires_grad_(True)`, on a `copy.deepcopy` if it is another trainer's teacher, or pass a "
        "`peft_config`"
    )
    raise ValueError(
        "The student is frozen: none of its parameters has `requires_grad=True`, so nothing would be "
        f"learned: {remedy}; to evaluate only, leave `train_dataset` out."
    )


def check_trainable(student: nn.Module, optimizers: tuple[Any, Any]) -> None:
    """Refuses a student of which no weight would be stepped: frozen, or unknown to the optimizer that was passed."""
    check_can_learn(student)
    optimizer, scheduler = optimizers
    wrapped = getattr(optimizer, "optimizer", None)  # accelerate wraps it in a training
    if scheduler is not None and getattr(scheduler, "optimizer", None) not in (None, optimizer, wrapped):
        raise ValueError(
            "The scheduler belongs to another optimizer, so it would not change this one's rate: pass "
            "`(optimizer, scheduler)` with the optimizer it was made for."
        )
    check_optimizer(student, optimizer)


def check_optimizer(student: nn.Module, optimizer: Any) -> None:
    """Refuses an optimizer that has none of the student's trained weights, and warns of those it lacks."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:  # none was passed, or the launcher makes it
        return
    # By identity, as the optimizer has no names.
    trained = {id(one): name for name, one in student.named_parameters() if one.requires_grad}
    held = {id(one) for group in groups for one in group["params"]}
    left_out = [name for place, name in trained.items() if place not in held]
    if len(left_out) == len(trained):
        raise ValueError(
            "The optimizer has no trained parameter of the student: it was made for another model, or "
            "before the adapter was added. Make it from `model.parameters()` of the student that is passed, with its "
            "adapter, or set `optim` in `OPSDConfig`."
        )
    if left_out:
        logger.warning(
            f"The optimizer steps {len(trained) - len(left_out)} of the {len(trained)} trained "
            f"parameters of the student; {left_out[0]!r} is the first that stays as it is. Freeze those "
            "(`requires_grad_(False)`) if that is meant: their gradients are computed."
        )
