"""Methods to copy and change: each does in a few lines what has no option.

OPSDTrainer(..., methods=[Discounted(0.95)])
trl-opsd train ... --methods '{"small_methods.Discounted": {"factor": 0.95}}'    # in the folder of this file
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from trl_opsd import Method
from trl_opsd.losses import Divergence, ForwardKL
from trl_opsd.methods import OffPolicy
from trl_opsd.types.rollout import Author


@dataclass
class Discounted(Method):
    """Each token counts `factor` times the one before: at 0.99 the 70th half, above 1 later tokens more."""

    factor: float = 0.99

    def token_weights(self, weights, rollout, rows, targets):
        return weights * self.factor ** torch.arange(weights.size(1), device=weights.device)


@dataclass
class AlongCompletion(Method):
    """Weights at equally spaced places from a completion's first token to its last, interpolated between them.

    These are about those of arXiv 2605.21606, where the teacher's judgement is worst at the start.
    """

    table: Sequence[float] = (0.29, 0.34, 0.45, 0.62, 0.8, 0.91, 0.96, 0.99, 0.99, 1, 1)

    def token_weights(self, weights, rollout, rows, targets):
        real = (rollout.completion_mask != 0).long()
        last = (real.sum(1, keepdim=True) - 1).clamp(min=1)
        at = (real.cumsum(1) - 1).clamp(min=0) / last * (len(self.table) - 1)
        table, below = weights.new_tensor(self.table), at.long().clamp(max=len(self.table) - 2)
        return weights * torch.lerp(table[below], table[below + 1], at - below)


@dataclass
class ShortAtFirst(Method):
    """The limit of completions rises from `start` to `max_completion_length` over so many steps (arXiv 2605.31490)."""

    start: int = 64
    steps: int = 100

    def limit(self, tokens):
        left = max(0.0, 1 - self.host.state.global_step / self.steps)
        return tokens - int((tokens - min(self.start, tokens)) * left)

    def generated(self, batch):
        if batch.is_training:
            self.host.record("completions/limit", self.limit(self.host.args.max_completion_length))


@dataclass
class OffPolicyFirst(Method):
    """The student's share of the completions rises from `lmbda` to 1, linearly over a share of the training's steps."""

    until: float = 1.0

    def before(self, rows):
        args, state = self.host.args, self.host.state
        done = state.global_step / (self.until * state.max_steps)
        for row in rows:
            # By the place of the row alone: a resumed run draws the same.
            drawn = random.Random(f"{args.seed} {state.global_step} {row.place}").random()
            if row.is_off_policy and drawn < done:
                row.author = Author.STUDENT
                if (method := self.host.methods.get(OffPolicy)) is not None:
                    row.nll_weight -= method.nll_weight


@dataclass
class AnchoredBy(Method):
    """After `Anchor`: another divergence from the student as it was passed than the reverse KL."""

    divergence: Divergence = field(default_factory=ForwardKL)

    def objective(self, objective):
        return replace(objective, anchor=self.divergence)
