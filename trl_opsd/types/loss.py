"""A loss: per token, and summed over a micro-batch.

B rows · N tokens in the loss
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

TENTHS = 10
"""Equal parts of a completion whose losses are summed separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken:
    """One value per token in the loss, in nats and float32."""

    divergence: Tensor
    """[N], multiplied by the weights if given; carries the gradient to the student."""
    student_entropy: Tensor
    """[N], no gradient."""
    teacher_entropy: Tensor
    """[N], no gradient."""
    teacher_uniform: Tensor | None = None
    """[N], whether the teacher's logits are all equal, which leaves nothing to learn; `None` where it is not known."""
    clipped: Tensor | None = None
    """[N], float32, 1 where an entry of the vocabulary was clipped; `None` where not known."""
    pulled: Tensor | None = None
    """[N], no gradient: weighted part of `divergence` that `Sampled.pull` added; `None` where there was no pull."""
    same_first: Tensor | None = None
    """[N], float32, 1 where the same token is the likeliest of both models; `None` where not known."""
    teacher_first: Tensor | None = None
    """[N], float32, 1 where the sampled token is the teacher's likeliest; `None` where not known."""
    importance: Tensor | None = None
    """[N], float32, importance weight of the sampled token, 1 where it has none; `None` where not known."""
    ranked: Tensor | None = None
    """[N], float32, 1 where both models' likeliest tokens were ranked; `None` where not known, like the next two."""
    top_shared: Tensor | None = None
    """[N], float32, share of one model's 16 likeliest tokens that are among the other's; 0 where not ranked."""
    top_mass: Tensor | None = None
    """[N], float32, the student's probability of these shared tokens; 0 where not ranked."""


UNWEIGHTED = tuple(one.name for one in fields(PerToken) if one.default is None)
"""Optional fields of [`PerToken`]: the sum of each over a row is a statistic of the same name, without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One process's contribution to a loss: local sums, for the caller to reduce across processes."""

    ROW_NAMES: ClassVar[tuple[str, ...]] = (
        "weight",
        "divergence",
        "student_entropy",
        "teacher_entropy",
        "tokens",
        *UNWEIGHTED,
        "high_entropy_weight",
        "high_entropy_divergence",
        *(f"weight_{tenth}" for tenth in range(TENTHS)),
        *(f"divergence_{tenth}" for tenth in range(TENTHS)),
    )
    """Names of the columns of `rows`."""

    loss: Tensor
    """Scalar, divided by the denominator of the whole optimizer step; carries the gradient."""
    rows: Tensor
    """[B, 36], float32, sums over the tokens of each row, in the order of `ROW_NAMES`: weights; divergences, entropies
    and pull in nats times weight; the others without weights, as [`PerToken`] has them. From `high_entropy_weight` on
    all are 0 where the row is only a part of a completion."""

    scored: Tensor | None = None
    """[2], float32: the number of tokens that `token_selection` scored, and the sum of their scores in nats; `None`
    where it did not."""

    def __add__(self, other: LossParts) -> LossParts:
        """Adds the parts of two groups of tokens of the same rows; both must have the same denominator."""
        scored = None if self.scored is None or other.scored is None else self.scored + other.scored
        return LossParts(loss=self.loss + other.loss, rows=self.rows + other.rows, scored=scored)


def columns(rows: Tensor, *names: str) -> Tensor:
    """[B, len(names)], these statistics of [`LossParts.rows`]."""
    return torch.stack([rows[:, LossParts.ROW_NAMES.index(name)] for name in names], dim=1)
