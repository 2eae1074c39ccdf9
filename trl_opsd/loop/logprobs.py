"""Carries the log-probabilities that tokens were sampled with from the rollout to their loss, row by row.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.data.readers import Request
from trl_opsd.losses import Divergence, SampledReverseKL
from trl_opsd.types import Rollout

__all__ = ["WithLogprobs"]


class WithLogprobs(DistillationTrainer):
    """A trainer whose loss may weigh a sampled token by its likelihood now relative to when it was sampled."""

    args: OPSDConfig
    divergence: Divergence
    rollout: Any

    @property
    def learns_from_draws(self) -> bool:
        """Whether the loss is a policy gradient, which depends on the distribution that tokens were sampled from."""
        return isinstance(self.divergence, SampledReverseKL)

    @property
    def reads_logprobs(self) -> bool:
        """Whether the loss of the current generation uses them. Engines report those at temperature 1."""
        return (
            self.learns_from_draws
            and self.rollout.tells_logprobs
            and self.model.training
            and self.temperature == 1
            and not self.tools
        )

    def note_logprobs(self, row: Request, prompt_ids: list[int], completion_ids: list[int]) -> None:
        """Sets the sampling log-probabilities of a row, as soon as the rollout has returned it."""
        if self.reads_logprobs:
            found = self.rollout.logprobs(prompt_ids, completion_ids)
            row.logprobs = None if found is None else (completion_ids, found)

    def logprobs_of(self, rollout: Rollout, rows: Sequence[Any]) -> dict[str, Tensor]:
        """`logprobs` of a batch, [B, C], if all processes know those of all rows; else empty. Collective."""
        if not self.reads_logprobs:
            return {}
        known = [getattr(row, "logprobs", None) for row in rows]
        # Where a subclass has changed a completion since, what its tokens were sampled with is not known.
        found = [one for one, ids in zip(known, rollout.completion_lists(), strict=True) if one and one[0] == ids]
        device = self.accelerator.device
        if not self.accelerator.gather(torch.tensor([len(found) == len(rows)], device=device)).all():
            return {}
        logprobs_BC = torch.zeros(rollout.completion_ids.shape)
        for row, (_, values) in enumerate(found):
            logprobs_BC[row, : len(values)] = torch.tensor(values)
        return {"logprobs": logprobs_BC.to(device)}
