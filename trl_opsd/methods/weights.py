"""What counts how much in the loss: tokens by who wrote them, then rows or teachers alike.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from trl_opsd._compat.values import NotNegative, Positive
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


@final
@dataclass
class Aggregation(Method):
    """Sets how much each row counts in the loss; the ratios between the weights of its tokens stay.

    Args:
        by (`str`): What has equal weight in the loss: `"rows"`, each row, however long; `"teachers"`, each teacher with
            a token in the step, whatever the number and length of its rows; in an evaluation, each of the dataset, also
            in `divergence/mean` and entropies. Without this method, each token of a step.
        weights (`dict`, *optional*): Weight of each teacher by name, with `by="teachers"`; only ratios matter:
            `{"math": 2, "code": 1}`. When `None`, all are 1.
    """

    by: Literal["rows", "teachers"]
    weights: dict[str, Positive] | None = None

    whole_rows = False

    @property
    def whole_batch(self) -> bool:
        """Whether what a row counts depends on all rows of its step."""
        return self.by == "teachers"

    def check(self, args: Any, teachers: Sequence[str]) -> None:
        """Raises `ValueError` for weights of others than the teachers of rows."""
        if self.weights is not None and self.by == "teachers" and {*self.weights} != {*teachers}:
            raise ValueError(
                f"`Aggregation(weights={self.weights})`: the teachers are {sorted(teachers)}: expected one number for "
                "each of these; add or rename them."
            )
        several = self.by == "teachers" and len(teachers) > 1
        self._teachers: dict[str, float] = dict.fromkeys(teachers, 1.0) | (self.weights or {}) if several else {}

    def final_weights(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        sums_B1 = weights.sum(1, keepdim=True)
        if self.by == "rows":
            worth_B = [row.prompt_weight * row.gate for row in rows]
            return weights / torch.where(sums_B1 > 0, sums_B1, 1.0) * weights.new_tensor(worth_B).unsqueeze(1)
        if not self._teachers or not self.host.model.training:  # `evaluated` has the sums of the whole dataset
            return weights
        sums = dict.fromkeys(self._teachers, 0.0)
        for row, one in zip(rows, sums_B1.flatten().tolist(), strict=True):
            sums[row.request.teacher] += one
        of_all = self.host.accelerator.reduce(weights.new_tensor([*sums.values()]), "sum").tolist()
        factors = self._factors(dict(zip(sums, of_all, strict=True)))
        return weights * weights.new_tensor([factors[row.request.teacher] for row in rows]).unsqueeze(1)

    def evaluated(self, sums: MutableMapping[str, Any]) -> None:
        if not self._teachers:
            return
        factors = self._factors({name: sums[f"weight/{name}"] for name in self._teachers})
        for name in {one.partition("/")[0] for one in sums if "/" in one} - {"tokens"}:
            for teacher, factor in factors.items():
                sums[f"{name}/{teacher}"] *= factor
            sums[name] = sum(sums[f"{name}/{teacher}"] for teacher in factors)

    def _factors(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Factor of each teacher's weights: shares become the configured ones, and the total stays."""
        total, asked = sum(sums.values()), sum(self._teachers[name] for name, one in sums.items() if one)
        return {name: total * self._teachers[name] / asked / one if one else 1.0 for name, one in sums.items()}
