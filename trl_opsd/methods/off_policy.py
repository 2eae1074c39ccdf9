"""Tokens that the student has not written: their weight in the loss, and their likelihood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from trl_opsd._compat.values import NotNegative
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.options.rules import refuse
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import Author

_BY_DEFAULT = {one.word: float(one is not Author.ENVIRONMENT) for one in Author}


@final
@dataclass
class OffPolicy(Method):
    """Weighs the tokens of a training by who wrote them, and adds `-log p` of completions that are not the student's.

    Args:
        weights (`dict[str, float]`, *optional*): Weight of the tokens in the loss by author: `"student"`, `"teacher"`,
            `"dataset"` and `"environment"`, which are the answers of tools. By default 0 for these, and 1 for others.
        nll_weight (`float`, *optional*, defaults to 0): Weight of `-log p` of the student's tokens in a completion that
            is wholly the dataset's or the teacher's (`lmbda` below 1), beside the divergence.
    """

    weights: Mapping[str, NotNegative] = field(default_factory=dict)
    nll_weight: NotNegative = 0.0

    whole_rows = False

    @property
    def adds_nll(self) -> bool:  # type: ignore[override]
        """Whether it adds to the divergence."""
        return self.nll_weight > 0

    def check(self, args: Any, teachers: Sequence[str]) -> None:
        unknown = sorted({*self.weights} - {*_BY_DEFAULT})
        refuse([(unknown, f"`OffPolicy(weights=...)` has {unknown}", f"expected some of {[*_BY_DEFAULT]}")])

    def before(self, rows: Sequence[BatchRow]) -> None:
        for row in rows:
            row.nll_weight += self.nll_weight * row.is_off_policy

    def select(self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        if not self.weights:
            return weights
        assert rollout.authors is not None, "it was made of rows"
        by_author = weights.new_tensor([{**_BY_DEFAULT, **self.weights}[one.word] for one in Author])
        counts = rollout.weights if self.host.learns_from_draws else rollout.completion_mask
        return by_author[rollout.authors] * (counts != 0)
