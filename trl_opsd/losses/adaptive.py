"""The adaptive Kullback-Leibler divergence: both directions, weighted by where the models differ.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Entrywise, Terms
from trl_opsd.losses.kl import ForwardKL, ReverseKL, kl_terms


@final
@dataclass(frozen=True, slots=True)
class AdaptiveKL(Entrywise):
    """`h KL(p_t || p_s) + (1 - h) KL(p_s || p_t)` with a share `h` for each token of the completion (AKL, arXiv
    2404.02657): that of the head in `sum |p_s - p_t|`.

    The head are the teacher's most likely tokens, from the first on while their probabilities add up to at most `mu`,
    and always the first; that is how the published code has it, while the paper also counts the token that passes
    `mu`. The share is a constant: no gradient flows through it. Where the models agree it is one half.

    The gradient with respect to the student's logits is those of both directions, weighted alike:
    `h (p_s - p_t) + (1 - h) p_s (log p_s - log p_t - KL(p_s || p_t))`. There is no fused
    kernel, because each row is sorted.

    Args:
        mu (`float`, *optional*, defaults to `0.5`):
            Largest probability of the head, from 0 to 1.

    Raises:
        ValueError: If `mu` is not from 0 to 1.
    """

    mu: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu <= 1.0:
            raise ValueError(f"mu is {self.mu}, expected a probability, from 0 to 1; 0.5 is as published.")

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        share_R1 = self._share(log_student_RV.detach().exp(), log_teacher_RV.detach().exp())
        forward_RV, reverse_RV = (one.entries(log_student_RV, log_teacher_RV) for one in (ForwardKL(), ReverseKL()))
        return share_R1 * forward_RV + (1 - share_R1) * reverse_RV

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        share_R1 = self._share(student_RV, teacher_RV)
        # One gap, negated in place, serves both directions.
        gap_RV = log_teacher_RV.sub_(log_student_RV)
        forward_RV = kl_terms(gap_RV, teacher_RV, student_RV, log_student_RV)
        reverse_RV = kl_terms(gap_RV.neg_(), student_RV, teacher_RV, log_student_RV)
        values_RV = reverse_RV.lerp_(forward_RV, share_R1)
        slopes_RV = gap_RV.mul_(student_RV).lerp_(student_RV - teacher_RV, share_R1)
        return Terms(values_RV, slopes_RV, drift=2 * share_R1 - 1)

    def _share(self, student_RV: Tensor, teacher_RV: Tensor) -> Tensor:
        """The weight of the forward KL, [R, 1]."""
        sorted_RV, order_RV = teacher_RV.sort(dim=-1, descending=True, stable=True)
        gaps_RV = (student_RV.gather(-1, order_RV) - sorted_RV).abs_()
        tail_RV = sorted_RV.cumsum(-1) > self.mu
        tail_RV[:, :1] = False
        total_R1 = gaps_RV.sum(-1, keepdim=True)
        head_R1 = gaps_RV.masked_fill_(tail_RV, 0.0).sum(-1, keepdim=True)
        return torch.where(total_R1 > 0, head_R1 / total_R1, 0.5)
