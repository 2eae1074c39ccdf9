"""Sends each row of a generation batch to its own teacher, one teacher after the other.

B rows · C completion tokens · M states that are kept · N tokens in the loss
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from trl_opsd.losses.token_selection import Selection
from trl_opsd.models.head import shape_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.checks import check_depends_on_input, prove_alignment
from trl_opsd.types import OutputHead, Rollout, RowTargets, Sampled, TeacherTargets
from trl_opsd.types.checks import check_targets
from trl_opsd.types.kept import Arriving, fetch, kept_by_row


def targets_of(
    teachers: Mapping[str, Teacher], rollout: Rollout, names: Sequence[str], unproved: Collection[str] = ()
) -> TeacherTargets:
    """The targets of each row from the teacher in `names`; answers of `unproved` teachers are examined."""
    if len(teachers) == 1:
        ((name, teacher),) = teachers.items()
        return _checked(teacher, rollout, name, name in unproved)
    number_of = {name: number for number, name in enumerate(teachers)}
    found: dict[int, RowTargets] = {}
    for name in dict.fromkeys(names):  # one teacher at a time, so that only one has to be on the device
        rows = [row for row, one in enumerate(names) if one == name]
        of_theirs = rollout.select(rows)
        theirs = kept_by_row(_checked(teachers[name], of_theirs, name, name in unproved), of_theirs.weights)
        found.update(zip(rows, theirs.rows or (), strict=True))
    numbers_B = torch.tensor([number_of[name] for name in names])
    return TeacherTargets.by_row([found[row] for row in range(len(names))], rollout.weights.size(1), numbers_B)


@dataclass(frozen=True, slots=True)
class Share:
    """N tokens in a loss that one teacher has scored, by row and position; tensors in host memory until selected."""

    teacher: int
    """Its number."""
    places_N: Tensor
    """Indices of the tokens in [B * C], int64."""
    weights_BC: Tensor
    """The weights of these tokens, 0 for all others."""
    weights_N: Tensor | None
    """The weights of these tokens alone; `None` if all are 1, which saves a product with each logit's gradient."""
    kept: Arriving
    """The teacher's states of these tokens and possibly of others, while they are copied."""
    kept_N: Tensor | None
    """Indices of these tokens in `kept`, int64; `None` if they are all of it."""
    highest_K: Tensor | None = None
    """[K], int64: indices to select once the tokens of each row are sorted by score; `None` for no selection."""

    def of_student(self, hidden_BCH: Tensor, device: torch.device) -> Tensor:
        """The student's states of these tokens, [N, H], on a device; differentiable."""
        return _selected(hidden_BCH.flatten(0, 1), self.places_N).to(device, non_blocking=True)

    def of_tokens(self, rollout: Rollout, device: torch.device) -> Sampled:
        """These tokens and how they were sampled, on a device."""
        tokens = rollout.completion_ids.size(1)
        pull_BC = None if rollout.pull is None else rollout.pull[:, None].expand(-1, tokens)

        def of_share(each_BC: Tensor | None) -> Tensor | None:
            return None if each_BC is None else _selected(each_BC.flatten(), self.places_N)

        ids_N = _selected(rollout.completion_ids.flatten(), self.places_N)
        return Sampled(ids_N, of_share(pull_BC), of_share(rollout.logprobs)).to(device)

    def of_teacher(self, device: torch.device) -> Tensor:
        """The teacher's states of these tokens, [N, H], on a device; no copy unless its head has moved since."""
        kept_MH = self.kept.wait()
        return (kept_MH if self.kept_N is None else _selected(kept_MH, self.kept_N)).to(device)


def shares(
    heads: Sequence[OutputHead],
    targets: TeacherTargets,
    weights_BC: Tensor,
    selection: Selection | None = None,
    host_BC: Tensor | None = None,
) -> list[Share]:
    """Splits the tokens in a loss by teacher, and starts to copy their targets, beside the student's forward."""
    # Without a copy of the weights in host memory, this waits for the device.
    host_BC = weights_BC.cpu() if host_BC is None else host_BC
    rows = kept_by_row(targets, weights_BC).rows or ()
    numbers = [0] * len(rows) if targets.teacher is None else targets.teacher.tolist()
    found = []
    for number, head in enumerate(heads):
        theirs = [row for row, one in enumerate(numbers) if one == number]
        theirs_BC = torch.zeros_like(host_BC)
        theirs_BC[theirs] = host_BC[theirs]
        places_N = theirs_BC.flatten().nonzero().squeeze(1)
        # A teacher without a token is left out, but for the first, so that there is always a loss.
        if number and not len(places_N):
            continue
        weights_N = theirs_BC.flatten()[places_N]
        kept_at_M = torch.cat([places_N[:0], *(rows[row].places + row * host_BC.size(1) for row in theirs)])
        counts_M = theirs_BC.flatten()[kept_at_M] != 0
        if (missing := len(places_N) - int(counts_M.sum())) > 0:
            raise ValueError(
                f"{missing} tokens have a weight in the loss but no target: they are padding, or were not written by "
                "the student. Leave their `loss_weights` at 0."
            )
        # Without a row, an empty tensor of the teacher's width stands for its states.
        kept = [rows[row].hidden for row in theirs] or [_no_states(head)]
        if targets.teacher is not None:
            kept = [_as_of(head, states) for states in kept]
        found.append(
            Share(
                teacher=number,
                places_N=places_N,
                weights_BC=theirs_BC,
                weights_N=None if bool((weights_N == 1).all()) else weights_N,
                kept=fetch(kept, head.weight.device),
                kept_N=None if bool(counts_M.all()) else counts_M.nonzero().squeeze(1),
                highest_K=None if selection is None else _highest(theirs_BC, selection),
            )
        )
    return found


def _highest(weights_BC: Tensor, selection: Selection) -> Tensor:
    """The first indices of each row, as many as are selected."""
    tokens_B = (weights_BC != 0).sum(1).tolist()
    starts_B = accumulate(tokens_B, initial=0)
    each = [range(start, start + selection.kept(tokens)) for start, tokens in zip(starts_B, tokens_B, strict=False)]
    return torch.tensor(list(chain.from_iterable(each)), dtype=torch.long)


def _selected(states_MH: Tensor, places_N: Tensor) -> Tensor:
    return states_MH.index_select(0, places_N.to(states_MH.device, non_blocking=True))


def _no_states(head: OutputHead) -> Tensor:
    return torch.empty(0, shape_of(head)[1], dtype=head.weight.dtype, device=head.weight.device)


def _as_of(head: OutputHead, states_nH: Tensor) -> Tensor:
    """Restores width and dtype of one teacher's states, if all teachers' were joined in one block of the widest."""
    # Padding and float32 come from joining teachers of different widths and dtypes.
    own_nH = states_nH[:, : shape_of(head)[1]]
    return own_nH.to(head.weight.dtype) if own_nH.dtype == torch.float32 else own_nH


def _checked(teacher: Teacher, rollout: Rollout, name: str, unproved: bool) -> TeacherTargets:
    targets = _read(teacher, rollout)
    check_depends_on_input(rollout, targets, name)
    if unproved:
        if targets.rows is None:  # the teacher may reuse the tensor for its next answer
            targets = replace(targets, hidden=targets.hidden.clone())
        prove_alignment(partial(_read, teacher), rollout, targets, f"{type(teacher).__name__}.targets")
    return targets


def _read(teacher: Teacher, rollout: Rollout) -> TeacherTargets:
    with torch.no_grad():
        targets = teacher.targets(rollout)
    check_targets(targets, rollout, f"{type(teacher).__name__}.targets", width=shape_of(teacher.head)[1])
    return targets
