"""Losses of the sampled tokens alone, a policy gradient and a weighted `-log p`; and how far their sampler is away.

N tokens in the loss · R rows (tokens) · V vocabulary size; log-probabilities in nats

The gradient of both with respect to the student's logits is a number per row times `p_s - 1[id]`, so neither adds a
pass over the vocabulary to the loss that it is added to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence
from trl_opsd.types import Sampled


@final
@dataclass(frozen=True, slots=True)
class SampledReverseKL(Divergence):
    """`w (log p_s(y) - log p_t(y))` of the sampled y, with importance weight w: estimate k1 of `KL(p_s || p_t)`.

    The gradient is that of a policy whose advantage is the log ratio, which is a constant in it:
    `w (log p_s(y) - log p_t(y)) (1[y] - p_s)` with respect to the student's logits. Over tokens that the student
    samples its mean is the gradient of the reverse KL. It is the loss of Thinking Machines' "On-Policy Distillation"
    (importance sampling with the negative reverse KL as advantage), but for the bound of the weight and for the log
    ratio, which here has the student that learns and there the one that sampled; the two are the same where no step
    lies between. MiniLLM (arXiv 2306.08543) calls it the single-step part of the gradient, and computes that over the
    whole vocabulary, as [`ReverseKL`] does.

    `w = min(p_s(y) / p_rollout(y), clip_max)` is a constant too, the truncated importance weight of TRL's GRPO trainer
    (`"token_truncate"`); 1 where the rollout's own log-probabilities are not given, and 0 below `clip_min`
    (`"token_mask"`): such a token was drawn from a distribution that is hardly the student's.

    Args:
        clip_max (`float`, *optional*, defaults to `3.0`):
            Largest importance weight, `vllm_importance_sampling_clip_max` of TRL's GRPO; `None` for no bound.
        clip_min (`float`, *optional*):
            Smallest, `vllm_importance_sampling_clip_min` there: a token below it weighs nothing.

    Raises:
        ValueError: If `clip_max` is not above 0, or `clip_min` not between 0 and `clip_max`.
    """

    clip_max: float | None = 3.0
    clip_min: float | None = None

    def __post_init__(self) -> None:
        most = math.inf if self.clip_max is None else self.clip_max
        if not most > 0 or not (self.clip_min is None or 0 < self.clip_min < most):
            raise ValueError(f"{self}: expected 0 < clip_min < clip_max, where each may be None for no bound.")

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> NoReturn:
        raise ValueError(
            "SampledReverseKL is defined only for a sampled token, not for two distributions: call "
            "`streamed_divergence` or `dense_divergence` with `sampled`, or use ReverseKL(), which is its mean."
        )

    def importance(self, log_student_R: Tensor, logprobs_R: Tensor | None) -> Tensor:
        """The importance weight of each sampled token, [R], a constant."""
        if logprobs_R is None:
            return torch.ones_like(log_student_R)
        bound = math.inf if self.clip_max is None else self.clip_max
        ratio_R = (log_student_R.detach() - logprobs_R).exp()
        return ratio_R.clamp(max=bound).masked_fill(ratio_R < (self.clip_min or 0.0), 0.0)


class Drawn(NamedTuple):
    """What the sampled tokens of R rows add to a loss, without their weights. All are [R]."""

    value: Tensor
    """That of [`SampledReverseKL`], in nats; 0 for other divergences."""
    nll: Tensor
    """`nll_weight * -log p_s(ids)`, in nats."""
    importance: Tensor
    """Of each token; 1 for other divergences."""
    force: Tensor | None
    """The gradient with respect to the student's logits is `force * (p_s - 1[ids])`; `None` where it is 0."""


def drawn(divergence: Divergence, sampled: Sampled, log_student_R: Tensor, log_teacher_R: Tensor) -> Drawn:
    """What the sampled tokens add, from both log-probabilities of each; differentiable where `log_student_R` is."""
    # The dense loss differentiates `value + nll` by autograd; the streamed one uses `force`, the same gradient.
    zero_R, force_R = torch.zeros_like(log_student_R), sampled.nll_weight
    nll_R = zero_R if sampled.nll_weight is None else -sampled.nll_weight * log_student_R
    if not isinstance(divergence, SampledReverseKL):
        return Drawn(zero_R, nll_R, torch.ones_like(zero_R), force_R)
    importance_R = divergence.importance(log_student_R, sampled.logprobs)
    advantage_R = importance_R * (log_student_R.detach() - log_teacher_R)
    force_R = -advantage_R if force_R is None else force_R - advantage_R
    # The value of the log ratio, and the gradient of a constant times the log-probability.
    value_R = advantage_R * (1 + log_student_R - log_student_R.detach())
    return Drawn(value_R, nll_R, importance_R, force_R)


def gradient_of(force_R: Tensor, student_RV: Tensor, ids_R: Tensor) -> Tensor:
    """`force * (p_s - 1[ids])`, [R, V], from the student's probabilities."""
    gradient_RV = student_RV * force_R.unsqueeze(-1)
    return gradient_RV.scatter_add_(-1, ids_R.unsqueeze(-1), -force_R.unsqueeze(-1))


def against_sampler(log_student_N: Tensor, logprobs_N: Tensor) -> tuple[Tensor, Tensor]:
    """How far the sampler is from the student at each sampled token, nats, and 1 where that is known; else both 0.

    With `r = p_student / p_sampler` it is `r - 1 - log r`, the estimate k3 of `KL(sampler || student)`
    (http://joschu.net/blog/kl-approx.html). Over tokens that the sampler draws its mean is that of `-log r`, k1, but it
    is never below 0, and of two close distributions far less noisy: at 0.005 nats, 200 tokens know it to a tenth, where
    k1 needs 40,000.
    """
    gap_N = log_student_N.detach() - logprobs_N
    known_N = ~gap_N.isnan()
    return (gap_N.expm1() - gap_N).where(known_N, 0.0), known_N.float()
