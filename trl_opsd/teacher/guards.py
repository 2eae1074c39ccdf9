"""Rejects a teacher whose hidden states ignore its input; the loss would still fall."""

from __future__ import annotations

import torch

from trl_opsd.types import Rollout, TeacherTargets

_FEW = 4
"""Rows whose first and last target are compared first; if they differ, as nearly always, nothing else is."""


def check_depends_on_input(rollout: Rollout, targets: TeacherTargets, teacher: str) -> None:
    """Refuses hidden states that are the same after different tokens; waits for the weights and one comparison."""
    counts_BC = rollout.weights.cpu() != 0
    places = {row: counts_BC[row].nonzero().squeeze(1) for row in counts_BC.any(1).nonzero().flatten().tolist()}
    few = [targets.of(row, places[row][[0, -1]]) for row in list(places)[:_FEW]]
    if not few or not (torch.cat(few) == few[0][0]).all():
        return
    first = few[0][:1]  # only now all others
    if not all((targets.of(row, of_row) == first).all() for row, of_row in places.items()):
        return
    read_BC = torch.cat([rollout.prompt_ids[:, -1:], rollout.completion_ids[:, :-1]], dim=1)
    read_N = read_BC.cpu()[counts_BC]
    if (read_N != read_N[0]).any():
        raise ValueError(
            f"The {teacher} has the same hidden state at all {len(read_N)} tokens of a generation batch, whatever "
            "it reads: its weights are zeroed or were not loaded; load it again. The student was not changed."
        )
