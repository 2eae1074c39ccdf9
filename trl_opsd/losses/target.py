"""The target where other models stand beside the teacher: its log-probabilities, moved away from theirs.

C tokens of a tile · R rows of a block · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from trl_opsd.losses.completed import CompletedSide
from trl_opsd.losses.elementwise import FARTHEST, Finish, Push
from trl_opsd.losses.kernels import agree, kernels
from trl_opsd.losses.side import Side
from trl_opsd.types import ReferenceModel

TargetStep: TypeAlias = Callable[[Sequence[Finish], Sequence[Tensor], Sequence[Push]], None]
"""A function with the arguments and the effect of [`target_`]."""


def is_sum(teacher: Side | CompletedSide, others: Sequence[tuple[ReferenceModel, Side]]) -> bool:
    """Whether the target's logits are a sum of products, up to a constant per row, which a softmax does not see."""
    pushed = [(one, side) for one, side in others if one.push]
    return teacher.finish.is_plain and all(one.bound is None and side.finish.is_plain for one, side in pushed)


def project_target_(
    teacher: Side | CompletedSide,
    others: Sequence[tuple[ReferenceModel, Side]],
    tiles_CV: Sequence[Tensor],
    rows: slice,
    block: int,
) -> None:
    """Writes the target into the first of these tiles, and the products of others into theirs, which in a sum may be
    the first; `block` are the rows that eager steps take at once.
    """
    teacher_CV, summed = tiles_CV[0][: rows.stop - rows.start], is_sum(teacher, others)
    finishes, products, pushes = [teacher.finish], [teacher_CV], []
    teacher.project_(teacher_CV, rows, 1 + sum(one.push for one, _ in others) if summed else 1.0)
    for (one, side), tile_CV in zip(others, tiles_CV[1:], strict=True):
        shared = tile_CV is tiles_CV[0]
        side.project_(tile_CV, rows, -one.push if shared else 1.0, carry=float(shared))
        other_CV = tile_CV[: len(teacher_CV)]
        if one.push and not summed:
            finishes.append(side.finish)
            products.append(other_CV)
            pushes.append((one.push, one.bound))
        elif one.push and not shared:
            teacher_CV.add_(other_CV, alpha=-one.push)
    if pushes:
        step = target_step(teacher_CV.device)
        for some in zip(*(one.split(block if step is target_ else len(one)) for one in products), strict=True):
            step(finishes, some, pushes)


def target_(finishes: Sequence[Finish], products: Sequence[Tensor], pushes: Sequence[Push]) -> None:
    """Turns the first of some products [R, V], the teacher's, into logits of the target, up to a constant per row.

    `pushes` are those of the others, whose products stay as they are. What the teacher excludes stays excluded: its
    logit is so low that all that is added is rounded away.
    """
    teacher_RV, finish = products[0], finishes[0]
    finish(teacher_RV)
    total_R1, steps = teacher_RV.logsumexp(-1, keepdim=True), []
    for other, other_RV, (push, bound) in zip(finishes[1:], products[1:], pushes, strict=True):
        if not other.is_plain:
            other_RV = other_RV.clone()
            other(other_RV)
        gap_RV = (teacher_RV - other_RV).sub_(total_R1 - other_RV.logsumexp(-1, keepdim=True))
        if bound is not None:
            gap_RV.div_(bound).tanh_()
        elif finish.bias is not None or other.bias is not None:
            gap_RV.clamp_(-FARTHEST, FARTHEST)
        steps.append((gap_RV, push * (bound or 1.0)))
    for gap_RV, factor in steps:
        teacher_RV.add_(gap_RV, alpha=factor)


@cache
def target_step(device: torch.device) -> TargetStep:
    """The kernel on this device, or the eager steps where it does not work."""

    def run(step: TargetStep) -> tuple[Tensor]:
        values = torch.randn(3, 3, 128, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
        products = values[..., :100]  # no multiple of a block, so that masks are tested
        finishes = [Finish(products[0, 0].clone(), None), Finish(None, 20.0), Finish(None, None)]
        step(finishes, list(products), [(0.5, None), (-0.5, 2.0)])
        return (products[0].log_softmax(-1),)

    fused = kernels(device)
    step: TargetStep = target_ if fused is None else fused.fused_target_
    return step if step is target_ or agree(run, step, target_, "the target") else target_
