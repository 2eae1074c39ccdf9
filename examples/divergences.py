"""Divergences to copy and change: a class with a `value` is all that the trainer needs; autograd has the gradient.

    python examples/divergences.py --output out/divergence      # the quickstart, with `EntropyAwareKL`

In a script: `OPSDTrainer(..., divergence=EntropyAwareKL())`.
`needs_whole` refuses teachers of which some tokens are known: their entropies and orders of tokens are not known.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from trl_opsd.losses import Divergence, ForwardKL, ReverseKL


@dataclass(frozen=True)
class EntropyAwareKL(Divergence):
    """`KL(p_s || p_t)`, plus `KL(p_t || p_s)` where the teacher's entropy is above a threshold, in nats, so that the
    student keeps the choices that the teacher leaves open (EOPD, arXiv 2603.07079).

    There the reverse KL is estimated from the sampled token, and the forward KL from the teacher's 16 likeliest.
    """

    needs_whole: ClassVar[bool] = True
    threshold: float = 0.8

    def value(self, log_student, log_teacher):
        forward, reverse = (one.value(log_student, log_teacher) for one in (ForwardKL(), ReverseKL()))
        entropy = -(log_teacher.exp() * log_teacher).sum(-1)
        return reverse + forward * (entropy > self.threshold)


@dataclass(frozen=True)
class AdaptiveKL(Divergence):
    """`h KL(p_t || p_s) + (1 - h) KL(p_s || p_t)` with a share `h` for each token of the completion (AKL, arXiv
    2404.02657): that of the head in `sum |p_s - p_t|`, a constant; one half where both models agree.

    The head are the teacher's likeliest tokens, from the first on while their probabilities add up to at most `mu`, and
    always the first, as in the published code; the paper also counts the token that passes `mu`.
    """

    needs_whole: ClassVar[bool] = True
    mu: float = 0.5

    def value(self, log_student, log_teacher):
        sorted_teacher, order = log_teacher.exp().sort(dim=-1, descending=True, stable=True)
        gaps = (log_student.detach().exp().gather(-1, order) - sorted_teacher).abs()
        is_tail = sorted_teacher.cumsum(-1) > self.mu
        is_tail[:, 0] = False
        total = gaps.sum(-1)
        share = torch.where(total > 0, gaps.masked_fill(is_tail, 0.0).sum(-1) / total, 0.5)
        forward, reverse = (one.value(log_student, log_teacher) for one in (ForwardKL(), ReverseKL()))
        return share * forward + (1 - share) * reverse


@dataclass(frozen=True)
class AlphaDivergence(Divergence):
    """`(1 - sum p_t^alpha p_s^(1 - alpha)) / (alpha (1 - alpha))`: towards the reverse KL for `alpha` near 0 and the
    forward KL near 1; at 0.5, four times the squared Hellinger distance (AlphaNet, arXiv 2102.07954).
    """

    alpha: float = 0.5

    def value(self, log_student, log_teacher):
        mean = self.alpha * log_teacher.exp() + (1 - self.alpha) * log_student.exp()
        power = (self.alpha * log_teacher + (1 - self.alpha) * log_student).exp()
        return (mean - power).sum(-1) / (self.alpha * (1 - self.alpha))


if __name__ == "__main__":
    from quickstart import main

    main(divergence=EntropyAwareKL())
