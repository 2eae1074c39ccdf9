"""The elementwise part of the streamed divergence, in PyTorch or a fused kernel: from products to values and gradient.

R rows (tokens) · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence, Entrywise
from trl_opsd.losses.sampled import Drawn, SampledReverseKL, drawn, gradient_of
from trl_opsd.types import Sampled

STATISTICS = 10
"""Numbers per row that a step returns; [`eager_`] lists them."""
INFINITE = 1e7
"""Divergence in nats above which the result is infinite. Only an excluded token, whose logit is the lowest float32, can
cause so much; no finite logits come near."""

FARTHEST = 80.0
"""Most nats, without a bound, between two log-probabilities of a token that a bias may exclude in one model."""
Push: TypeAlias = tuple[float, float | None]
"""[`~types.ReferenceModel.push`] and `bound` of a model."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Turns products with a head into logits: adds a bias, then caps the sum."""

    bias: Tensor | None
    """[V], float32; it may be -inf."""
    cap: float | None
    """Logits are `cap * tanh(sum)`, or the sum itself where this is `None`."""

    @property
    def is_plain(self) -> bool:
        """Whether products are logits already."""
        return self.bias is None and self.cap is None

    def __call__(self, product_RV: Tensor) -> None:
        """Turns products into logits, in place."""
        if self.bias is not None:
            # A token excluded by a bias of -inf gets the lowest finite logit: probability 0, and 0 * log 0 = 0.
            product_RV.add_(self.bias).clamp_(min=torch.finfo(torch.float32).min)
        if self.cap is not None:
            product_RV.tanh_().mul_(self.cap)

    def slope(self, logits_RV: Tensor) -> Tensor | None:
        """The derivative of the cap at the finished logits, `1 - tanh^2`; `None` without a cap."""
        if self.cap is None:
            return None
        return (logits_RV / self.cap).square_().neg_().add_(1.0)


Step: TypeAlias = Callable[
    [Divergence, float | None, tuple[Finish, Finish], Tensor, Tensor, Tensor | None, Sampled | None, Tensor | None],
    Tensor,
]
"""A function with the arguments and the result of [`eager_`]."""


def eager_(
    divergence: Divergence,
    clip: float | None,
    finishes: tuple[Finish, Finish],
    student_RV: Tensor,
    teacher_RV: Tensor,
    weights_R: Tensor | None,
    sampled: Sampled | None,
    gradient_RV: Tensor | None,
) -> Tensor:
    """The statistics of R rows of products, [10, R], and the gradient in `gradient_RV`; overwrites the products."""
    # `clip`, nats per entry, needs an `Entrywise` divergence, and `SampledReverseKL` needs `sampled`. `gradient_RV` may
    # be `student_RV` itself, so it is written last.
    for finish, products_RV in zip(finishes, (student_RV, teacher_RV), strict=True):
        finish(products_RV)
    slope_RV = finishes[0].slope(student_RV)
    same_R = _same_first_(student_RV, teacher_RV)
    log_student_RV, probs_RV, student_entropy_R, _ = _normalise_(student_RV)
    log_teacher_RV, teacher_probs_RV, teacher_entropy_R, total_R = _normalise_(teacher_RV)
    zero_R, first_R, push_RV = torch.zeros_like(total_R), torch.zeros_like(total_R), None
    of_sampled, log_sampled_R = Drawn(zero_R, zero_R, torch.ones_like(total_R), None), zero_R
    if sampled is not None:
        ids_R1 = sampled.ids.unsqueeze(-1)
        chosen = [log_RV.gather(-1, ids_R1).squeeze(-1) for log_RV in (log_student_RV, log_teacher_RV)]
        log_sampled_R = chosen[0]
        first_R = (chosen[1] >= total_R.log().neg_()).to(total_R)
        if sampled.nll_weight is not None or isinstance(divergence, SampledReverseKL):
            of_sampled = drawn(divergence, sampled, *chosen)
        if of_sampled.force is not None and gradient_RV is not None:
            push_RV = gradient_of(of_sampled.force, probs_RV, sampled.ids)
    value_R, found_RV, cut_R = of_sampled.value, push_RV, zero_R
    if not isinstance(divergence, SampledReverseKL):
        storage = log_student_RV, log_teacher_RV, probs_RV, teacher_probs_RV
        value_R, found_RV, cut_R = _compared_(divergence, clip, storage, gradient_RV is not None)
        if push_RV is not None and found_RV is not None:
            found_RV.add_(push_RV)
    values_2R = torch.stack([value_R, of_sampled.nll])
    values_2R.masked_fill_(values_2R > INFINITE, torch.inf).masked_fill_(values_2R < -INFINITE, -torch.inf)
    if weights_R is not None:
        values_2R.mul_(weights_R).masked_fill_(weights_R == 0, 0.0)  # 0 * inf is NaN
    if gradient_RV is not None:
        # With respect to the products up to the factor `cap`, which `Side.backproject_` multiplies in.
        assert found_RV is not None, "it was wanted"
        if slope_RV is not None:
            found_RV.mul_(slope_RV)
        if weights_R is not None:
            found_RV.mul_(weights_R.unsqueeze(-1))
        gradient_RV.copy_(found_RV)
    value_R, nll_R = values_2R
    # The mean of the teacher's probabilities relative to the largest: 1 if all of its logits are equal.
    ratio_R = total_R / teacher_RV.size(-1)
    entropies = student_entropy_R, teacher_entropy_R
    # The order is that of the kernel's stores and of `_Fold.run`: the divergence without `nll`, both entropies, that
    # ratio, 1 if clipped, the part of `nll`, 1 if both models have the same likeliest token, 1 if the sampled token is
    # the teacher's likeliest, its importance weight, and its log-probability under the student.
    of_both = cut_R, nll_R, same_R, first_R, of_sampled.importance, log_sampled_R
    return torch.stack([value_R, *entropies, ratio_R, *of_both])


def _compared_(
    divergence: Divergence, clip: float | None, storage: tuple[Tensor, Tensor, Tensor, Tensor], wanted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The divergence of two distributions, its gradient if `wanted`, and whether an entry was clipped."""
    if clip is not None:
        assert isinstance(divergence, Entrywise), "check_clip has refused others"
        return divergence.clipped_(clip, *storage)
    uncut_R = storage[0].new_zeros(len(storage[0]))
    if not wanted:
        return divergence.value_alone(*storage), None, uncut_R
    return *divergence.value_and_gradient(*storage), uncut_R


def _same_first_(student_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    """Subtracts the largest logit of each row, in place; returns 1 where both have it at the same token, [R]."""
    for logits_RV in (student_RV, teacher_RV):
        logits_RV.sub_(logits_RV.amax(-1, keepdim=True))
    # The largest sum, and not the place of the largest: on a CPU that takes four times as long.
    return ((student_RV + teacher_RV).amax(-1) == 0).to(student_RV)


def _normalise_(logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities in place of logits whose largest is 0; with probabilities, entropy [R] and their sum [R]."""
    # Not `torch.log_softmax`: the probabilities would need the exponentials a second time, and on a CPU it sums them
    # sequentially, which over a vocabulary costs a digit of the gradient. The sum is relative to the largest one.
    probs_RV = logits_RV.exp()
    total_R1 = probs_RV.sum(-1, keepdim=True)
    logits_RV.sub_(total_R1.log())
    probs_RV.div_(total_R1)
    return logits_RV, probs_RV, (probs_RV * logits_RV).sum(-1).neg_(), total_R1.squeeze(-1)


# ---- Which tokens both models find likeliest ------------------------------------------------------------------------

LIKELIEST = 16
"""K, of arXiv 2604.13016; the whole vocabulary where that is smaller."""
EVERY = 16
"""One of so many tokens is ranked, because ranking a vocabulary takes as long as normalising it."""


def looked_at(tokens: int, rows: slice) -> slice:
    """Which of these rows of a call with so many tokens are ranked, counted from the first of these rows."""
    # Equally far apart over the whole call, whatever its tiles are, and at least one where there is a token.
    middle = (tokens - 1) % EVERY // 2
    return slice((middle - rows.start) % EVERY, rows.stop - rows.start, EVERY)


def top_shared_(logits_2RV: Tensor) -> Tensor:
    """[2, R]: the share of one model's K likeliest tokens that are among the other's, and the student's mass there."""
    # Logits of student and teacher, up to a constant per row; the student's are overwritten.
    top_2RK, ids_2RK = logits_2RV.topk(min(LIKELIEST, logits_2RV.size(-1)), sorted=False)
    both_RK = (ids_2RK[0].unsqueeze(-1) == ids_2RK[1].unsqueeze(-2)).any(-1)
    first_R1 = top_2RK[0].amax(-1, keepdim=True)
    total_R = logits_2RV[0].sub_(first_R1).exp_().sum(-1)
    mass_R = ((top_2RK[0] - first_R1).exp_() * both_RK).sum(-1) / total_R
    return torch.stack([both_RK.float().mean(-1), mass_R.float()])
