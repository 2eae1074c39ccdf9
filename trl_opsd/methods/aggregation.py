"""Says what counts alike in the loss: tokens, rows, or teachers, since one teacher may have much shorter answers.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from trl_opsd._compat.values import Positive
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow


@final
@dataclass
class Aggregation(Method):
    """Scales the weights of rows, after all that weighs tokens within one: what that decides within a row stays.

    Args:
        by (`str`): What counts alike: `"rows"`, each row, however long; `"teachers"`, each teacher with a token in the
            step, whatever the number and length of its rows, and in an evaluation each of the dataset, in its loss,
            `divergence/mean` and entropies. Without this method, each token of a step.
        weights (`dict`, *optional*): Weights of the teachers by name with `"teachers"`, of which only ratios matter;
            for instance `{"math": 2, "code": 1}`. When `None`, all are 1.
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
