"""Weighs the tokens of a completion by where they stand: by position, or each turn alike.

B rows · C completion tokens · T turns
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
from torch import Tensor

from trl_opsd.losses.token_selection import along
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import Rule
from trl_opsd.options.table import LARGEST_WEIGHT, POSITIVES, Option, above
from trl_opsd.types import Rollout, TeacherTargets


@with_help
@dataclass
class DiscountOptions:
    position_discount: Annotated[
        float, Option(above(0), resumed=True, words="each token counted {:g} times the one before")
    ] = 1.0
    """In training, the weight of each completion token relative to the one before it; above 1, later tokens count
    more."""
    position_weights: Annotated[
        list[float] | None, Option(POSITIVES | None, resumed=True, words="weighted along the completion by {}")
    ] = None
    """In training, weights at equally spaced places of a completion, from its first token to its last, between which
    they are interpolated. When `None`, all are 1."""
    equal_turns: Annotated[
        bool, Option(resumed=True, words="each turn alike, a completion without tools being one")
    ] = False
    """In training, whether each turn of a completion weighs as much as any other, however long it is; a completion
    without tools is one turn. Otherwise each token does."""


@final
class Discounts(Method):
    """Weighs tokens by their position and turn."""

    rules = (
        Rule(
            lambda args: math.log(args.position_discount) * args.max_completion_length > math.log(LARGEST_WEIGHT),
            "`position_discount={0.position_discount}` to the power of "
            "`max_completion_length={0.max_completion_length}` is too large for a weight: set it nearer to 1, or use "
            "`position_weights`.",
        ),
    )

    @classmethod
    def of(cls, now: Any) -> Discounts | None:
        args = now.args
        return cls() if args.position_discount != 1 or args.position_weights is not None or args.equal_turns else None

    def weigh(self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow], targets: TeacherTargets) -> Tensor:
        args = self.host.args
        return along(rollout.completion_mask, weights, args.position_discount, args.position_weights)

    def normalise(self, weights: Tensor, rollout: Rollout) -> Tensor:
        return by_turn(weights, rollout.generated) if self.host.args.equal_turns else weights


def by_turn(weights_BC: Tensor, spoken_BC: Tensor) -> Tensor:
    """The weights, divided by their sum over each turn: over tokens that the student generated one after the other."""
    before_BC = torch.nn.functional.pad(spoken_BC, (1, -1))
    turn_BC = (spoken_BC & ~before_BC).cumsum(1) * spoken_BC  # 0 where the student generated nothing
    sums_BT = weights_BC.new_zeros(len(weights_BC), 1 + weights_BC.size(1)).scatter_add(1, turn_BC, weights_BC)
    each_BC: Tensor = sums_BT.gather(1, turn_BC)
    return weights_BC / torch.where(weights_BC > 0, each_BC, 1.0)
