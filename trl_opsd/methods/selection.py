"""Trains on some tokens of each row: the first, random ones, or those that score highest.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd._compat.values import Share
from trl_opsd.losses.objective import Objective
from trl_opsd.losses.token_selection import Selection
from trl_opsd.methods.base import Method, Part
from trl_opsd.methods.rows import BatchRow
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import Rollout
from trl_opsd.types.loss import columns
from trl_opsd.types.metrics import STEPS, Logs, Metric

_SALT = 1
"""Separates the seeds of token selection from those of `lmbda`."""


@final
@dataclass
class TokenSelection(Method):
    """Trains on a share of the tokens of each row; by a criterion that needs logits, they are selected in the loss.

    Args:
        criterion (`str`): Which tokens: `"prefix"`, the first; `"random"`; or those with the highest
            `"student_entropy"`, `"teacher_divergence"`, `"teacher_confidence"` (lowest entropy of the teacher) or
            `"student_surprise"` (lowest probability under the student); see `docs/objectives.md`.
        fraction (`float`): Share of the tokens of a row that is kept, rounded up to whole tokens.
    """

    criterion: Literal[
        "prefix", "random", "student_entropy", "teacher_divergence", "teacher_confidence", "student_surprise"
    ]
    fraction: Share

    metrics: ClassVar = {
        "selection/share": Metric(
            "1",
            "Share of tokens that are trained on; all other metrics of a training are over these tokens.",
            Logs(STEPS, "the method `token_selection`; not where processes share rows", evaluated=False),
        ),
    }

    @property
    def selection(self) -> Selection:
        """The same as the loss has it."""
        return Selection(self.criterion, self.fraction)

    @property
    def by_token(self) -> bool:  # type: ignore[override]
        """Whether it ranks tokens by distributions over tokens, which no process has of a row that it shares."""
        return self.selection.is_late

    whole_rows = by_token

    def select(self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        if self.selection.is_late:
            return weights
        seed, step = self.host.args.seed, self.host.state.global_step
        return self.selection.chosen(weights, [derived_seed(seed, step, row.place, _SALT) for row in rows])

    def final_weights(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        # The denominator of the step is known before the logits that a late criterion needs.
        return self.selection.thinned(weights) if self._is_late else weights

    def objective(self, objective: Objective) -> Objective:
        return replace(objective, selection=self.selection) if self._is_late else objective

    @property
    def _is_late(self) -> bool:
        return self.selection.is_late and self.host.model.training

    def tally(self, part: Part) -> Tensor:
        """[2]: tokens that were selected, and tokens to select from."""
        weight_B, tokens_B = columns(part.sums, "weight", "tokens").unbind(1)
        counted_B = (weight_B > 0).to(part.sums.dtype)  # a row repeated only to keep collectives matched has no weight
        candidates_BC = part.rollout.counts if self.selection.is_late else part.rollout.generated
        return torch.stack([tokens_B, candidates_BC.sum(1).to(part.sums)]).mul(counted_B).sum(1)

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        if tally is None:
            return
        selected, candidates = tally.tolist()
        if candidates:
            self.host.record("selection/share", selected / candidates)
