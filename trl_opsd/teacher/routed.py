"""Gives each row of a generation batch to its own teacher, one teacher after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trl_opsd.models.head import shape_of
from trl_opsd.run.targets import check_targets
from trl_opsd.teacher.alignment import prove_alignment
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.guards import check_depends_on_input
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


def targets_of(
    teachers: Mapping[str, Teacher], rollout: Rollout, names: Sequence[str], unproved: Collection[str] = ()
) -> TeacherTargets:
    """The targets of each row, from its own teacher.

    Args:
        teachers (`Mapping[str, Teacher]`):
            The teachers by name.
        rollout ([`~types.Rollout`]):
            B rows.
        names (`Sequence[str]`):
            B names, the teacher of each row.
        unproved (`Collection[str]`, *optional*):
            Teachers of which it is not known yet whether their targets are those of the tokens.

    Returns:
        [`~types.TeacherTargets`]: [B, C, H_t], where H_t is the width of the widest teacher.
    """
    if len(teachers) == 1:
        ((name, teacher),) = teachers.items()
        return _checked(teacher, rollout, name, name in unproved)
    number_of = {name: number for number, name in enumerate(teachers)}
    numbers_B = torch.tensor([number_of[name] for name in names])
    hidden_BCH: Tensor | None = None
    for name in dict.fromkeys(names):  # one teacher at a time, so that only one has to be on the device
        rows = numbers_B == number_of[name]
        of_theirs = rollout.select(rows.nonzero().flatten().tolist())
        theirs = _checked(teachers[name], of_theirs, name, name in unproved).hidden
        if hidden_BCH is None:
            width = max(shape_of(teacher.head)[1] for teacher in teachers.values())
            dtype = torch.float32 if len(_dtypes(teachers)) > 1 else theirs.dtype
            hidden_BCH = theirs.new_zeros(len(names), theirs.size(1), width, dtype=dtype)
        hidden_BCH[rows.to(hidden_BCH.device), :, : theirs.size(2)] = theirs.to(hidden_BCH)
    assert hidden_BCH is not None, "a generation batch has rows"
    return TeacherTargets(hidden=hidden_BCH, teacher=numbers_B.to(hidden_BCH.device))


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens in a loss that one teacher has scored. N of them, by row and place."""

    teacher: int
    """Its number."""
    places_N: Tensor
    """Where the tokens are in [B * C], int64, in host memory."""
    weights_BC: Tensor
    """The weights of these tokens, 0 for all others, in host memory."""
    weights_N: Tensor | None
    """The same for these tokens alone; `None` if all are 1, which saves a product with each logit's gradient."""

    def select(self, hidden_BCH: Tensor, device: torch.device) -> Tensor:
        """The states of these tokens, [N, H], on a device; differentiable."""
        rows = hidden_BCH.flatten(0, 1)
        return rows.index_select(0, self.places_N.to(rows.device, non_blocking=True)).to(device, non_blocking=True)


def shares(teachers: int, targets: TeacherTargets, weights_BC: Tensor) -> list[Share]:
    """Splits the tokens in a loss by teacher. Waits for the weights, so it is to be called before the student reads.

    Args:
        teachers (`int`):
            Number of teachers.
        targets ([`~types.TeacherTargets`]):
            What [`targets_of`] returned, for these rows.
        weights_BC (`torch.Tensor`):
            [B, C], 0 for a token that does not count.

    Returns:
        `list[Share]`: Teachers without a token are left out, but for the first, so that there is always a loss.
    """
    host_BC = weights_BC.cpu()
    found = []
    for number in range(teachers):
        theirs_BC = host_BC
        if targets.teacher is not None:
            theirs_BC = host_BC * (targets.teacher.cpu() == number).unsqueeze(-1)
        places_N = theirs_BC.flatten().nonzero().squeeze(1)
        if number == 0 or len(places_N):
            weights_N = theirs_BC.flatten()[places_N]
            found.append(Share(number, places_N, theirs_BC, None if bool((weights_N == 1).all()) else weights_N))
    return found


def teacher_states(share: Share, targets: TeacherTargets, head: OutputHead) -> Tensor:
    """The states of the teacher of a share, [N, H], in its own width and dtype, on the device of its head."""
    hidden_NH = share.select(targets.hidden, head.weight.device)
    if targets.teacher is None:
        return hidden_NH
    hidden_NH = hidden_NH[:, : shape_of(head)[1]]
    # Stored in float32 if teachers differ in dtype; the cast back to the teacher's own dtype is exact.
    return hidden_NH.to(head.weight.dtype) if hidden_NH.dtype == torch.float32 else hidden_NH


def _checked(teacher: Teacher, rollout: Rollout, name: str, unproved: bool) -> TeacherTargets:
    targets = _read(teacher, rollout)
    check_depends_on_input(rollout, targets, name)
    if unproved:
        targets = replace(targets, hidden=targets.hidden.clone())  # the teacher may write its next answer over this one
        prove_alignment(partial(_read, teacher), rollout, targets, f"{type(teacher).__name__}.targets")
    return targets


def _read(teacher: Teacher, rollout: Rollout) -> TeacherTargets:
    with torch.no_grad():
        targets = teacher.targets(rollout)
    check_targets(targets, rollout, f"{type(teacher).__name__}.targets", width=shape_of(teacher.head)[1])
    return targets


def _dtypes(teachers: Mapping[str, Teacher]) -> set[torch.dtype]:
    return {teacher.head.weight.dtype for teacher in teachers.values()}
