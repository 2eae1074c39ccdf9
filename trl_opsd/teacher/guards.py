"""Rejects a teacher whose hidden states ignore its input; the loss would still fall."""

from __future__ import annotations

import torch

from trl_opsd.types import Rollout, TeacherTargets


def check_depends_on_input(rollout: Rollout, targets: TeacherTargets, teacher: str) -> None:
    """Checks that the teacher's hidden states are not the same everywhere, as those of zeroed weights are.

    Args:
        rollout ([`~types.Rollout`]):
            The rollout the teacher has read.
        targets ([`~types.TeacherTargets`]):
            Its targets, row-aligned.
        teacher (`str`):
            Its name, for the message.

    Raises:
        ValueError: The hidden states are the same after different tokens.
    """
    counts_BC = rollout.counts
    read_BC = torch.cat([rollout.prompt_ids[:, -1:], rollout.completion_ids[:, :-1]], dim=1)
    read_N = read_BC[counts_BC]
    if not read_N.numel() or (read_N == read_N[0]).all():
        return
    hidden_NH = targets.hidden[counts_BC.to(targets.hidden.device)]
    if (hidden_NH == hidden_NH[0]).all():
        raise ValueError(
            f"The {teacher} has the same hidden state at all {len(hidden_NH)} tokens of a generation batch, whatever "
            "it reads: its weights are zeroed or were not loaded; load it again. The student was not changed."
        )
