"""The sampled tokens, for losses that depend on which token was drawn.

N tokens in the loss
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """The completion tokens at the positions of a loss, and how they were sampled; all constants."""

    ids: Tensor
    """[N], int64, the token that follows at each position."""
    pull: Tensor | None = None
    """[N], float32: adds `pull * -log p_s(ids)` to the value of each token, with the gradient `pull * (p_s - 1[ids])`
    with respect to the student's logits; `None` adds nothing."""
    logprobs: Tensor | None = None
    """[N], float32, nats: log-probability of each token in the distribution that it was drawn from; where `None`, that
    is the student's own."""

    def rows(self, rows: slice) -> Sampled:
        """Those of some positions."""
        return Sampled(*(None if one is None else one[rows] for one in self._values()))

    def to(self, device: torch.device) -> Sampled:
        """The same on another device."""
        return Sampled(*(None if one is None else one.to(device, non_blocking=True) for one in self._values()))

    def _values(self) -> list[Tensor]:
        return [getattr(self, one.name) for one in fields(self)]
