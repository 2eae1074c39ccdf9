"""Weighs each token by the divergence that follows it in its completion (IW-OPD, arXiv 2606.22600; TRL's `iw_opd`).

OPSDTrainer(..., methods=[WeighedAhead()])   # with any divergence; TRL's is "sampled_reverse_kl"
"""

from dataclasses import dataclass, replace

from trl_opsd import Method


@dataclass
class WeighedAhead(Method):
    """A token counts `1 + gamma * share` times, by the share of its completion's `|log p_teacher - log p_sampler|` that
    does not lie before it. The loss is still divided by the number of tokens, as in TRL, whose log ratio with
    `sampled_reverse_kl` has the sampler's probability in place of the student's, and no importance weight.
    """

    gamma: float = 0.5
    epsilon: float = 1e-8
    by_token = True

    def objective(self, objective):
        return replace(objective, factors=self.factors) if self.host.model.training else objective

    def factors(self, student, teacher, sampler):
        gaps = (teacher - sampler).abs()
        before = gaps.cumsum(1) - gaps
        return 1 + self.gamma * (1 - before / gaps.sum(1, keepdim=True).clamp(min=self.epsilon))
