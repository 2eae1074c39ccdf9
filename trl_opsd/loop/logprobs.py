"""Takes the log-probabilities that tokens were sampled with from the rollout to their loss, row by row.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.data.intake import Request
from trl_opsd.losses import Divergence, SampledReverseKL
from trl_opsd.types import Rollout

__all__ = ["WithLogprobs"]


class WithLogprobs(DistillationTrainer):
    """A trainer whose loss may weigh a sampled token by how much likelier it has become since it was sampled."""

    args: OPSDConfig
    divergence: Divergence
    rollout: Any

    @property
    def learns_from_draws(self) -> bool:
        """Whether the loss estimates a gradient from which tokens were drawn, by the student's own probabilities."""
        return isinstance(self.divergence, SampledReverseKL)

    @property
    def reads_logprobs(self) -> bool:
        """Whether the loss of what is written now reads them. Engines tell those at temperature 1."""
        return (
            self.learns_from_draws
            and self.rollout.tells_logprobs
            and self.model.training
            and self.temperature == 1
            and not self.tools
        )

    def note_logprobs(self, row: Request, prompt_ids: list[int], completion_ids: list[int]) -> None:
        """Tells a row what its completion was sampled with, as soon as the rollout has returned it."""
        if self.reads_logprobs:
            found = self.rollout.logprobs(prompt_ids, completion_ids)
            row.logprobs = None if found is None else (completion_ids, found)

    def logprobs_of(self, rollout: Rollout, rows: Sequence[Any]) -> dict[str, Tensor]:
        """`logprobs` of a batch, [B, C] as in [`~types.Rollout`], if those of all its rows are known, in all
        processes; else nothing. Collective.
        """
        if not self.reads_logprobs:
            return {}
        known = [getattr(row, "logprobs", None) for row in rows]
        found = [one for one, ids in zip(known, rollout.completion_lists(), strict=True) if one and one[0] == ids]
        device = self.accelerator.device
        if not self.accelerator.gather(torch.tensor([len(found) == len(rows)], device=device)).all():
            return {}
        logprobs_BC = torch.zeros(rollout.completion_ids.shape)
        for row, (_, values) in enumerate(found):
            logprobs_BC[row, : len(values)] = torch.tensor(values)
        return {"logprobs": logprobs_BC.to(device)}
