"""Trains on some tokens of each row: the first, random ones, or those that score highest.

B rows · C completion tokens · n tokens of a row in the loss · k = ceil(fraction * n) of them that are kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd._compat.values import Share
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.base import Method, Part
from trl_opsd.methods.rows import BatchRow
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import Rollout
from trl_opsd.types.loss import columns
from trl_opsd.types.metrics import STEPS, Logs, Metric

_SALT = 1
"""Separates the seeds of token selection from those of `lmbda`."""
LATE = ("student_entropy", "teacher_divergence", "teacher_confidence", "student_surprise")
"""Criteria that need logits."""
_DIGITS = 9
"""Decimals to which the number of kept tokens is known before it is rounded up: 0.07 of 100 are 7, though the product
is 7.000000000000001."""


@final
@dataclass
class TokenSelection(Method):
    """Trains on a share of the tokens of each row.

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
            Logs(STEPS, "the method `token_selection`; not with `sp_size`", evaluated=False),
        ),
    }

    @property
    def by_token(self) -> bool:  # type: ignore[override]
        """Whether it ranks tokens by distributions over tokens, which no process has of a row that it shares."""
        return self.criterion in LATE

    whole_rows = by_token

    def kept(self, tokens: int) -> int:
        """k of n."""
        return math.ceil(round(self.fraction * tokens, _DIGITS))

    def chosen(self, weights_BC: Tensor, seeds: Sequence[int]) -> Tensor:
        """The weights, [B, C], and 0 for tokens that are not kept, by an early criterion; B seeds. Waits for them."""
        host_BC = weights_BC.cpu()
        kept_BC = torch.zeros_like(host_BC)
        for weights_C, kept_C, seed in zip(host_BC, kept_BC, seeds, strict=True):
            places_n = weights_C.nonzero().squeeze(1)
            if self.criterion == "random":
                places_n = places_n[torch.randperm(len(places_n), generator=torch.Generator().manual_seed(seed))]
            kept_C[places_n[: self.kept(len(places_n))]] = 1
        return weights_BC * kept_BC.to(weights_BC.device)

    def thinned(self, weights_BC: Tensor) -> Tensor:
        """The weights times k / n of their row: what those that a late criterion keeps will add up to.

        The loss is divided by the sum of the weights of a whole step, which has to be known before its first
        micro-batch is. Where all tokens of a row weigh the same, its sum is then that of its kept tokens.
        """
        tokens_B = (weights_BC != 0).sum(1).tolist()
        shares_B = [self.kept(tokens) / max(tokens, 1) for tokens in tokens_B]
        return weights_BC * weights_BC.new_tensor(shares_B).unsqueeze(1)

    def select(self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        if self.by_token:
            return weights
        seed, step = self.host.args.seed, self.host.state.global_step
        return self.chosen(weights, [derived_seed(seed, step, row.place, _SALT) for row in rows])

    def final_weights(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        # The denominator of the step is known before the logits that a late criterion needs.
        return self.thinned(weights) if self._is_late else weights

    def objective(self, objective: Objective) -> Objective:
        return replace(objective, selection=self) if self._is_late else objective

    @property
    def _is_late(self) -> bool:
        return self.by_token and self.host.model.training

    def tally(self, part: Part) -> Tensor:
        """[2]: tokens that were selected, and tokens to select from."""
        weight_B, tokens_B = columns(part.sums, "weight", "tokens").unbind(1)
        counted_B = (weight_B > 0).to(part.sums.dtype)  # a row repeated only to keep collectives matched has no weight
        candidates_BC = part.rollout.counts if self.by_token else part.rollout.generated
        return torch.stack([tokens_B, candidates_BC.sum(1).to(part.sums)]).mul(counted_B).sum(1)

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        if tally is None:
            return
        selected, candidates = tally.tolist()
        if candidates:
            self.host.record("selection/share", selected / candidates)
