"""Has each turn of a completion weigh alike, however long it is; without tools a completion is one turn.

OPSDTrainer(..., methods=[EqualTurns()])   # the last of several, as it divides what others weigh
"""

import torch

from trl_opsd import Method


class EqualTurns(Method):
    """Divides the weights of tokens by the sum of their turn."""

    def token_weights(self, weights, rollout, rows, targets):
        spoken_BC = rollout.generated  # 0 for what tools said
        before_BC = torch.nn.functional.pad(spoken_BC, (1, -1))
        turn_BC = (spoken_BC & ~before_BC).cumsum(1) * spoken_BC  # 0 where the student generated nothing
        sums_BT = weights.new_zeros(len(weights), 1 + weights.size(1)).scatter_add(1, turn_BC, weights)
        each_BC = sums_BT.gather(1, turn_BC)
        return weights / torch.where(weights > 0, each_BC, 1.0)
