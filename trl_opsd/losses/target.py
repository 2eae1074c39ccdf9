"""The target where other models stand beside the teacher: its log-probabilities, moved away from theirs.

C tokens of a tile · R rows of a block · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from trl_opsd.losses.elementwise import Finish, agree, kernels
from trl_opsd.types import Beside

if TYPE_CHECKING:
    from trl_opsd.losses.streamed import _Side

FARTHEST = 80.0
"""Most nats, without a bound, between two log-probabilities of a token that a bias may exclude in one model."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the student is compared with: the teacher, and the models that its distribution is moved away from."""

    teacher: _Side
    others: Sequence[tuple[Beside, _Side]]

    @property
    def is_linear(self) -> bool:
        """Whether its logits are a sum of products, up to a constant per row, which a softmax does not see."""
        pushed = [(one, side) for one, side in self.others if one.push]
        return self.teacher.finish.is_plain and all(one.bound is None and side.finish.is_plain for one, side in pushed)

    @property
    def finish(self) -> Finish:
        """What is left to be done to its tile."""
        return Finish(None, None) if any(one.push for one, _ in self.others) else self.teacher.finish

    @property
    def held(self) -> list[bool]:
        """Which of the others have a tile of their own: in a sum, only one that is also an anchor."""
        return [bool(one.anchor) or not self.is_linear for one, _ in self.others]

    def project_(self, teacher_CV: Tensor, others_CV: Sequence[Tensor], rows: slice, block: int) -> None:
        """Writes its tile, which is the teacher's, and the products of the others that have another one.

        `block` are the rows that eager steps take at once.
        """
        linear, tokens = self.is_linear, rows.stop - rows.start
        self.teacher.project_(teacher_CV, rows, 1 + sum(one.push for one, _ in self.others) if linear else 1.0)
        finishes, tiles_CV, pushes = [self.teacher.finish], [teacher_CV[:tokens]], []
        for (one, side), other_CV in zip(self.others, others_CV, strict=True):
            if other_CV is teacher_CV:
                side.project_(teacher_CV, rows, -one.push, carry=1.0)
                continue
            side.project_(other_CV, rows)
            if linear and one.push:
                tiles_CV[0].add_(other_CV[:tokens], alpha=-one.push)
            elif one.push:
                finishes.append(side.finish)
                tiles_CV.append(other_CV[:tokens])
                pushes.append((one.push, one.bound))
        if pushes:
            step = target_step(teacher_CV.device)
            for some in zip(*(one.split(block if step is target_ else tokens) for one in tiles_CV), strict=True):
                step(finishes, some, pushes)


# ---- The step that makes it of products, where it is no sum ----------------------------------------------------------

Push: TypeAlias = tuple[float, float | None]
"""[`~types.Beside.push`] and `bound` of a model."""
TargetStep: TypeAlias = Callable[[Sequence[Finish], Sequence[Tensor], Sequence[Push]], None]
"""A function with the arguments and the effect of [`target_`]."""


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
        elif is_limited(finish, other):
            gap_RV.clamp_(-FARTHEST, FARTHEST)
        steps.append((gap_RV, push * (bound or 1.0)))
    for gap_RV, factor in steps:
        teacher_RV.add_(gap_RV, alpha=factor)


def is_limited(one: Finish, other: Finish) -> bool:
    """Whether a difference without a bound is at most `FARTHEST`."""
    return one.bias is not None or other.bias is not None


def target_step(device: torch.device) -> TargetStep:
    """The kernel on this device, or the eager steps where it does not work."""
    fused = kernels(device)
    if fused is None or not _works(fused.fused_target_, device):
        return target_
    step: TargetStep = fused.fused_target_
    return step


@cache
def _works(step: TargetStep, device: torch.device) -> bool:
    return agree(partial(_on_a_tile, device=device), step, target_, "the target")


def _on_a_tile(step: TargetStep, device: torch.device) -> tuple[Tensor]:
    """The target of a small random tile and two models, with all that a head may have."""
    values = torch.randn(3, 3, 128, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    products = values[..., :100]  # no multiple of a block, so that masks are tested
    finishes = [Finish(products[0, 0].clone(), None), Finish(None, 20.0), Finish(None, None)]
    step(finishes, list(products), [(0.5, None), (-0.5, 2.0)])
    return (products[0].sub_(products[0].logsumexp(-1, keepdim=True)),)
