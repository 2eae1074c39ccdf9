"""Kullback-Leibler divergences in both directions, and the generalised Jensen-Shannon divergence between them.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Entrywise, Terms

FAR = 80.0
"""Gap between two log-probabilities in nats, beyond which the smaller one contributes nothing to a mixture."""


@final
@dataclass(frozen=True, slots=True)
class ForwardKL(Entrywise):
    """`KL(p_teacher || p_student)`, mode-covering: penalises tokens that the student underrates (TRL's `beta=0`).

    The gradient with respect to the student's logits is `p_s - p_t`.
    """

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return log_teacher_RV.exp() * (log_teacher_RV - log_student_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        gap_RV = log_teacher_RV.sub_(log_student_RV)
        return Terms(kl_terms(gap_RV, teacher_RV, student_RV, log_student_RV), student_RV - teacher_RV, drift=1.0)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        values_RV, slopes_RV, _ = self.terms(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
        return values_RV.sum(-1), slopes_RV  # their sum is 0, so they are the gradient


@final
@dataclass(frozen=True, slots=True)
class ReverseKL(Entrywise):
    """`KL(p_student || p_teacher)`, mode-seeking: penalises tokens that the teacher finds unlikely (TRL's `beta=1`).

    The gradient with respect to the student's logits is `p_s (log p_s - log p_t - KL)`.
    """

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return log_student_RV.exp() * (log_student_RV - log_teacher_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        gap_RV = log_student_RV.sub_(log_teacher_RV)
        values_RV = kl_terms(gap_RV, student_RV, teacher_RV, log_teacher_RV)
        return Terms(values_RV, gap_RV.mul_(student_RV), drift=-1.0)


@final
@dataclass(frozen=True, slots=True)
class GeneralizedJSD(Entrywise):
    """`beta KL(p_t || m) + (1 - beta) KL(p_s || m)` with the mixture `m = (1 - beta) p_s + beta p_t`, as in GKD
    (arXiv 2306.13649) and in TRL.

    The gradient with respect to the student's logits is `(1 - beta) p_s (log p_s - log m - KL(p_s || m))`.

    Args:
        beta (`float`):
            Weight of the teacher in the mixture, strictly between 0 and 1. The divergence itself vanishes at both ends.

    Raises:
        ValueError: If `beta` is not strictly between 0 and 1.
    """

    beta: float

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"beta is {self.beta}, expected a number strictly between 0 and 1: "
                "use ForwardKL() for the end at 0 and ReverseKL() for the end at 1."
            )

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        log_mixture_RV = log_mixture(log_student_RV, log_teacher_RV, self.beta)
        of_teacher_RV = log_teacher_RV.exp() * (log_teacher_RV - log_mixture_RV)
        return self.beta * of_teacher_RV + (1 - self.beta) * log_student_RV.exp() * (log_student_RV - log_mixture_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        # log(m / p_s) from the gap d = log p_t - log p_s rather than from m: exactly 0 where the models agree, and
        # accurate near it, where distillation converges. Far apart p_s contributes nothing to m.
        gap_RV = log_teacher_RV.sub_(log_student_RV).clamp_(max=FAR)
        surplus_RV = torch.expm1(gap_RV, out=log_student_RV).mul_(self.beta).log1p_()
        gap_RV.sub_(surplus_RV)
        slopes_RV = surplus_RV.mul_(student_RV).mul_(self.beta - 1)
        return Terms(torch.addcmul(slopes_RV, gap_RV, teacher_RV, value=self.beta), slopes_RV)


def log_mixture(log_p_RV: Tensor, log_q_RV: Tensor, share: float) -> Tensor:
    """`log((1 - share) p + share q)`, differentiable, in any precision."""
    rest, part = (torch.tensor(one, dtype=log_p_RV.dtype).log() for one in (1 - share, share))
    return torch.logaddexp(log_p_RV + rest, log_q_RV + part)


def kl_terms(gap_RV: Tensor, p_RV: Tensor, q_RV: Tensor, spare_RV: Tensor) -> Tensor:
    """The terms of `KL(p || q)` from the gap `log p - log q`: `p gap + q - p`, none of which is below 0."""
    # Near agreement the rounding of a normaliser, which shifts a row of gaps alike, is larger than the divergence. The
    # sum of `q - p` is 0, and as `p expm1(-gap)` it contains the same shift, which cancels.
    surplus_RV = torch.neg(gap_RV, out=spare_RV).expm1_().mul_(p_RV)
    surplus_RV = torch.where(gap_RV > -FAR, surplus_RV, q_RV)  # below, p contributes nothing, and the exponential ends
    return surplus_RV.addcmul_(gap_RV, p_RV)
