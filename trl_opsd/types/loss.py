"""A loss, for each token and of a micro-batch.

B rows · N tokens in the loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

TENTHS = 10
"""Parts of a completion of which a loss is known apart, of equally many tokens."""


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
    """[N], float32, 1 where a token of the vocabulary would have added more than `kl_clip`; `None` where not known."""
    pulled: Tensor | None = None
    """[N], no gradient: what `Sampled.pull` has added to `divergence`, times the weight; `None` where nothing was."""
    same_first: Tensor | None = None
    """[N], float32, 1 where the same token is the likeliest of both models; `None` where not known."""
    teacher_first: Tensor | None = None
    """[N], float32, 1 where the sampled token is the teacher's likeliest; `None` where not known."""
    importance: Tensor | None = None
    """[N], float32, importance weight of the sampled token, 1 where it has none; `None` where not known."""
    ranked: Tensor | None = None
    """[N], float32, 1 where both models' likeliest tokens were looked at; `None` where not known, like the next two."""
    top_shared: Tensor | None = None
    """[N], float32, share of the 16 likeliest tokens of one model that are among those of the other; 0 elsewhere."""
    top_mass: Tensor | None = None
    """[N], float32, probability that the student gives to those that are in both; 0 elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """One process's contribution to a loss: local sums, for the caller to reduce across processes."""

    ROW_NAMES: ClassVar[tuple[str, ...]] = (
        "weight",
        "divergence",
        "student_entropy",
        "teacher_entropy",
        "tokens",
        "teacher_uniform",
        "clipped",
        "pulled",
        "same_first",
        "teacher_first",
        "importance",
        "ranked",
        "top_shared",
        "top_mass",
        "high_entropy_weight",
        "high_entropy_divergence",
        *(f"weight_{tenth}" for tenth in range(TENTHS)),
        *(f"divergence_{tenth}" for tenth in range(TENTHS)),
    )
    """Names of the columns of `rows`."""

    loss: Tensor
    """Scalar, divided by the denominator of the whole optimizer step; carries the gradient."""
    rows: Tensor
    """[B, 36], float32, in the order of `ROW_NAMES`: per row, the sum of the weights, three sums of nats times weight,
    the number of tokens in the loss, of those for which all logits of the teacher are equal, and of those in which
    `kl_clip` has clipped an entry; what `pull` has added to the loss, in nats times weight; the number of tokens whose
    likeliest is the same for both models, and of those that are the teacher's likeliest; a sum of importance weights;
    the number of tokens whose likeliest are looked at, and two sums over these; weight and divergence where the
    student's entropy is highest, and of each tenth of the completion, all 0 where the row is a part of a completion.
    """

    scored: Tensor | None = None
    """[2], float32: the number of tokens among which `token_selection` has chosen by a score, and the sum of their
    scores in nats; `None` where it has not."""

    def __add__(self, other: LossParts) -> LossParts:
        """Adds the parts of two groups of tokens of the same rows; both must have the same denominator."""
        scored = None if self.scored is None or other.scored is None else self.scored + other.scored
        return LossParts(loss=self.loss + other.loss, rows=self.rows + other.rows, scored=scored)
