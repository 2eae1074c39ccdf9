"""Has each turn of a completion weigh alike, however long it is.

B rows · C completion tokens · T turns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
from torch import Tensor

from trl_opsd.methods.base import Method
from trl_opsd.options.normalize import with_help
from trl_opsd.options.table import Option
from trl_opsd.types import Rollout


@with_help
@dataclass
class TurnOptions:
    equal_turns: Annotated[
        bool, Option(resumed=True, words="each turn alike, a completion without tools being one")
    ] = False
    """In training, whether each turn of a completion weighs as much as any other, however long it is; a completion
    without tools is one turn. When `False`, each token weighs the same."""


@final
class EqualTurns(Method):
    """Divides the weights of tokens by the sum of their turn."""

    @classmethod
    def of(cls, now: Any) -> EqualTurns | None:
        return cls() if now.args.equal_turns else None

    def normalise(self, weights: Tensor, rollout: Rollout) -> Tensor:
        return by_turn(weights, rollout.generated)


def by_turn(weights_BC: Tensor, spoken_BC: Tensor) -> Tensor:
    """The weights, divided by their sum over each turn: over tokens that the student generated one after the other."""
    before_BC = torch.nn.functional.pad(spoken_BC, (1, -1))
    turn_BC = (spoken_BC & ~before_BC).cumsum(1) * spoken_BC  # 0 where the student generated nothing
    sums_BT = weights_BC.new_zeros(len(weights_BC), 1 + weights_BC.size(1)).scatter_add(1, turn_BC, weights_BC)
    each_BC: Tensor = sums_BT.gather(1, turn_BC)
    return weights_BC / torch.where(weights_BC > 0, each_BC, 1.0)
