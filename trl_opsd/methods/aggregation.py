"""Says what counts alike in the loss: tokens, rows, or teachers, since one teacher may have much shorter answers.

B rows · C completion tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
from torch import Tensor

from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import Rule, Stage, together
from trl_opsd.options.table import Need, Option, Values, is_number, one_of

# without names of teachers, they are not known yet
_SEVERAL = Need(
    "`loss_aggregation` is 'teachers' and there is one teacher",
    lambda now: (
        now.loss_aggregation != "teachers" or len(now.teachers) - (now.extrapolation_reference is not None) != 1
    ),
)
_BY_TEACHER = Need("`loss_aggregation` is not 'teachers'", lambda now: now.loss_aggregation == "teachers")
_WEIGHTS = Values(
    "a dict of the names of teachers, each with a finite number above 0",
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(name, str) and is_number(one) and 0 < one < math.inf for name, one in value.items())
    ),
)


@with_help
@dataclass
class AggregationOptions:
    loss_aggregation: Annotated[
        str,
        Option(
            one_of("tokens", "rows", "teachers"),
            (_SEVERAL,),
            resumed=True,
            words="all {} alike",
            also="loss_agg_mode",
        ),
    ] = "tokens"
    """What counts alike in the loss. `"tokens"`: each token of a step, so long completions count more. `"rows"`: each
    row, however long. `"teachers"`: each teacher with a token in the step, whatever the number and length of its rows.
    An evaluation's loss, `divergence/mean` and entropies are such means over the dataset and all of its teachers."""
    teacher_weights: Annotated[
        dict | str | None, Option(_WEIGHTS | None, (_BY_TEACHER, _SEVERAL), words="but weighted {}")
    ] = None  # a resume compares it in the fingerprint's entry of this name, which is of the teachers
    """Weights of the teachers by name with `loss_aggregation="teachers"`; only their ratios matter: for instance
    `{"math": 2, "code": 1}`. When `None`, all are 1."""


def _misnamed(now: Any) -> tuple[list[str], list[str]] | None:
    """Names that have a weight, and the teachers of rows, if these are others."""
    rows = [name for name in now.teacher_names if name != now.extrapolation_reference]
    given = now.teacher_weights
    if given is None or now.loss_aggregation != "teachers" or not rows or {*given} == {*rows}:
        return None
    return sorted(given), sorted(rows)


@final
class Aggregation(Method):
    """Scales the weights of rows, after all that weighs tokens within one: what that decides within a row stays."""

    rules = (
        together(
            ": what a row counts depends on all rows of its step, but it is trained on before they are complete: set "
            "`loss_aggregation='rows'`, or `overlap='ahead'`.",
            loss_aggregation="teachers",
            overlap="step",
        ),
        Rule(
            _misnamed,
            "`teacher_weights` is of {1[0]}, but the teachers of rows are {1[1]}: expected one number for each of "
            "these; add or rename them.",
            at=Stage.ARGUMENTS,
        ),
    )

    def __init__(self, teachers: Mapping[str, float] | None) -> None:
        self._teachers = teachers
        """Their weights, where teachers count alike; `None` where rows do."""

    @classmethod
    def of(cls, now: Any) -> Aggregation | None:
        if now.loss_aggregation == "rows":
            return cls(None)
        if now.loss_aggregation == "tokens" or len(now.teacher_names) < 2:
            return None
        return cls(dict.fromkeys(now.teacher_names, 1.0) | (now.teacher_weights or {}))

    def weighed(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        sums_B1 = weights.sum(1, keepdim=True)
        if self._teachers is None:
            worth_B = [row.prompt_weight * row.gate for row in rows]
            return weights / torch.where(sums_B1 > 0, sums_B1, 1.0) * weights.new_tensor(worth_B).unsqueeze(1)
        if not self.host.model.training:  # `evaluated` has the sums of the whole dataset
            return weights
        sums = dict.fromkeys(self._teachers, 0.0)
        for row, one in zip(rows, sums_B1.flatten().tolist(), strict=True):
            sums[row.request.teacher] += one
        of_all = self.host.accelerator.reduce(weights.new_tensor([*sums.values()]), "sum").tolist()
        factors = self._factors(dict(zip(sums, of_all, strict=True)))
        for row in rows:
            if row.share is None:  # rows of a micro-batch that a subclass has changed have that of their step
                row.share = factors[row.request.teacher]
        return weights * weights.new_tensor([row.share for row in rows]).unsqueeze(1)

    def evaluated(self, sums: MutableMapping[str, Any]) -> None:
        if self._teachers is None:
            return
        factors = self._factors({name: sums[f"weight/{name}"] for name in self._teachers})
        for name in {one.partition("/")[0] for one in sums if "/" in one} - {"tokens"}:
            for teacher, factor in factors.items():
                sums[f"{name}/{teacher}"] *= factor
            sums[name] = sum(sums[f"{name}/{teacher}"] for teacher in factors)

    def _factors(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Factor of each teacher's weights: shares become the configured ones, and the total stays."""
        assert self._teachers is not None, "teachers count alike"
        total, asked = sum(sums.values()), sum(self._teachers[name] for name, one in sums.items() if one)
        return {name: total * self._teachers[name] / asked / one if one else 1.0 for name, one in sums.items()}
