"""Total variation and the alpha-divergence, which stay finite where one model excludes what the other expects.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Entrywise, Terms


@final
@dataclass(frozen=True, slots=True)
class TotalVariation(Entrywise):
    """`1/2 sum |p_s - p_t|`, from 0 to 1: the largest difference in the probability of any set of tokens (f-distill,
    arXiv 2307.15190).

    The gradient with respect to the student's logits is `1/2 p_s (g - E_s[g])` with `g = sign(p_s - p_t)`. It does not
    become smaller as the models come closer.
    """

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return (log_student_RV.exp() - log_teacher_RV.exp()).abs() / 2

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        gap_RV = torch.sub(student_RV, teacher_RV, out=log_student_RV)
        slopes_RV = torch.sign(gap_RV, out=log_teacher_RV).mul_(student_RV).mul_(0.5)
        return Terms(gap_RV.abs_().mul_(0.5), slopes_RV)


@final
@dataclass(frozen=True, slots=True)
class AlphaDivergence(Entrywise):
    """`(1 - sum p_t^alpha p_s^(1 - alpha)) / (alpha (1 - alpha))`: towards the reverse KL for `alpha` near 0 and the
    forward KL near 1; at 0.5, four times the squared Hellinger distance (AlphaNet, arXiv 2102.07954).

    The gradient with respect to the student's logits is `(p_s E_s[r] - p_s r) / alpha` with `r = (p_t / p_s)^alpha`.

    Args:
        alpha (`float`, *optional*, defaults to `0.5`):
            Strictly between 0 and 1.

    Raises:
        ValueError: If `alpha` is not strictly between 0 and 1.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0:
            raise ValueError(
                f"alpha is {self.alpha}, expected a number strictly between 0 and 1: use ReverseKL() for the end at 0 "
                "and ForwardKL() for the end at 1."
            )

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        mean_RV = self.alpha * log_teacher_RV.exp() + (1 - self.alpha) * log_student_RV.exp()
        power_RV = (self.alpha * log_teacher_RV + (1 - self.alpha) * log_student_RV).exp()
        return (mean_RV - power_RV) / (self.alpha * (1 - self.alpha))

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        power_RV = log_student_RV.lerp(log_teacher_RV, self.alpha).exp_()
        gap_RV = log_teacher_RV.sub_(log_student_RV)
        near_RV = gap_RV.abs() < 1.0  # there the differences are smaller than what they are taken of
        rise_RV = torch.mul(gap_RV, self.alpha, out=log_student_RV).expm1_().mul_(student_RV)
        rise_RV = torch.where(near_RV, rise_RV, power_RV.sub_(student_RV))  # p_t^alpha p_s^(1 - alpha) - p_s
        lead_RV = torch.where(near_RV, gap_RV.expm1_().mul_(student_RV), teacher_RV - student_RV)
        values_RV = lead_RV.mul_(self.alpha).sub_(rise_RV).div_(self.alpha * (1 - self.alpha))
        return Terms(values_RV, rise_RV.div_(-self.alpha))
