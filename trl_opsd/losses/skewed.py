"""Kullback-Leibler divergences to a mixture, which are bounded and smoother than those to the other model.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Entrywise, Terms
from trl_opsd.losses.kl import FAR, log_mixture


@final
@dataclass(frozen=True, slots=True)
class SkewedForwardKL(Entrywise):
    """`KL(p_t || m)` with `m = skew p_t + (1 - skew) p_s`, at most `-log skew` nats (DistiLLM, arXiv 2402.03898).

    The gradient with respect to the student's logits is `p_s (E_s[r] - r)` with `r = (1 - skew) p_t / m`.

    Args:
        skew (`float`, *optional*, defaults to `0.1`):
            Share of the teacher in the mixture, strictly between 0 and 1; at 0 it would be the forward KL.

    Raises:
        ValueError: If `skew` is not strictly between 0 and 1.
    """

    skew: float = 0.1

    def __post_init__(self) -> None:
        _check_skew(self.skew, "ForwardKL()")

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        log_mixture_RV = log_mixture(log_student_RV, log_teacher_RV, self.skew)
        return log_teacher_RV.exp() * (log_teacher_RV - log_mixture_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        surplus_RV, rise_RV, far_RV = _to_mixture(log_student_RV, log_teacher_RV, self.skew)
        values_RV = surplus_RV.sub_(rise_RV).mul_(teacher_RV)
        # Where p_t is negligible, the term tends to (1 - skew) p_s.
        values_RV = torch.where(far_RV, student_RV * (1 - self.skew), values_RV)
        slopes_RV = rise_RV.neg_().expm1_().mul_(student_RV).mul_(self.skew - 1)
        return Terms(values_RV, slopes_RV, drift=1 - self.skew)


@final
@dataclass(frozen=True, slots=True)
class SkewedReverseKL(Entrywise):
    """`KL(p_s || m)` with `m = skew p_s + (1 - skew) p_t`, at most `-log skew` nats (DistiLLM, arXiv 2402.03898).

    The gradient with respect to the student's logits is `p_s (r - E_s[r])` with `r = log(p_s / m) - skew p_s / m`.

    Args:
        skew (`float`, *optional*, defaults to `0.1`):
            Share of the student in the mixture, strictly between 0 and 1; at 0 it would be the reverse KL.

    Raises:
        ValueError: If `skew` is not strictly between 0 and 1.
    """

    skew: float = 0.1

    def __post_init__(self) -> None:
        _check_skew(self.skew, "ReverseKL()")

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        log_mixture_RV = log_mixture(log_teacher_RV, log_student_RV, self.skew)
        return log_student_RV.exp() * (log_student_RV - log_mixture_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        surplus_RV, rise_RV, far_RV = _to_mixture(log_teacher_RV, log_student_RV, self.skew)
        values_RV = surplus_RV.sub_(rise_RV).mul_(student_RV)
        values_RV = torch.where(far_RV, teacher_RV * (1 - self.skew), values_RV)
        slopes_RV = torch.neg(rise_RV).expm1_().mul_(self.skew).add_(rise_RV).mul_(student_RV).neg_()
        return Terms(values_RV, slopes_RV, drift=self.skew - 1)


def _to_mixture(log_p_RV: Tensor, log_q_RV: Tensor, skew: float) -> tuple[Tensor, Tensor, Tensor]:
    """`m / q - 1` and `log(m / q)` of `m = skew q + (1 - skew) p`, and where q is too small for either to be right."""
    # From the gap, so both are exactly 0 where the models agree; both log-probabilities are overwritten.
    gap_RV = log_p_RV.sub_(log_q_RV)
    far_RV = gap_RV > FAR
    surplus_RV = gap_RV.clamp_(max=FAR).expm1_().mul_(1 - skew)
    return surplus_RV, torch.log1p(surplus_RV, out=log_q_RV), far_RV


def _check_skew(skew: float, end: str) -> None:
    if not 0.0 < skew < 1.0:
        raise ValueError(
            f"skew is {skew}, expected a number strictly between 0 and 1: use {end} for the end at 0; at 1 nothing "
            "would be left of it."
        )
