"""Says which tokens of a row are learned: how many, and which where that is known before the models have read them.

B rows · C completion tokens · n tokens of a row in the loss · k of them that are kept
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["EARLY", "LATE", "Selection"]

EARLY = ("prefix", "random")
"""Criteria that need neither model."""
LATE = ("student_entropy", "teacher_divergence", "teacher_confidence", "student_surprise")
"""Criteria that need logits."""
_DIGITS = 9
"""Decimals to which the number of kept tokens is known before it is rounded up: 0.07 of 100 are 7, though the product
is 7.000000000000001."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Of the n tokens of a row in the loss, k = ceil(fraction * n) are kept."""

    criterion: str
    """One of [`EARLY`] or [`LATE`]."""
    fraction: float
    """In (0, 1)."""

    @property
    def is_late(self) -> bool:
        """Whether it needs logits, so that it is known only where the loss is computed."""
        return self.criterion in LATE

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
