"""The divergences of whole distributions: sums over the vocabulary, or over the teacher's likeliest tokens and a rest.

R rows (tokens) · V vocabulary size · K + 1 buckets; log-probabilities in nats
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence, Entrywise, Terms, of_logits_

FAR = 80.0
"""Gap between two log-probabilities in nats, beyond which the smaller one contributes nothing to a mixture."""


def _check_share(name: str, share: float, zero: str, one: str = "") -> None:
    """Refuses a share outside (0, 1); `zero` and `one` are the divergences at its ends, where it vanishes itself."""
    if not 0.0 < share < 1.0:
        at_one = f" and {one} for the end at 1" if one else "; at 1 it vanishes"
        raise ValueError(
            f"{name} is {share}, expected a number strictly between 0 and 1: use {zero} for the end at 0{at_one}."
        )


@final
@dataclass(frozen=True, slots=True)
class ForwardKL(Entrywise):
    """`KL(p_teacher || p_student)`, mode-covering: penalises tokens that the student underrates (TRL's `beta=0`; arXiv
    1503.02531).

    The gradient with respect to the student's logits is `p_s - p_t`.
    """

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return log_teacher_RV.exp() * (log_teacher_RV - log_student_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        gap_RV = log_teacher_RV.sub_(log_student_RV)
        return Terms(kl_terms(gap_RV, teacher_RV, student_RV), student_RV - teacher_RV, drift=1.0)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        values_RV, slopes_RV, _ = self.terms(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
        return values_RV.sum(-1), slopes_RV  # their sum is 0, so they are the gradient


@final
@dataclass(frozen=True, slots=True)
class ReverseKL(Entrywise):
    """`KL(p_student || p_teacher)`, mode-seeking: penalises tokens that the teacher finds unlikely (TRL's `beta=1`;
    MiniLLM, arXiv 2306.08543).

    The gradient with respect to the student's logits is `p_s (log p_s - log p_t - KL)`.
    """

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return log_student_RV.exp() * (log_student_RV - log_teacher_RV)

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        gap_RV = log_student_RV.sub_(log_teacher_RV)
        values_RV = kl_terms(gap_RV, student_RV, teacher_RV)
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

    beta: float = 0.5

    def __post_init__(self) -> None:
        _check_share("beta", self.beta, "ForwardKL()", "ReverseKL()")

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


def kl_terms(gap_RV: Tensor, p_RV: Tensor, q_RV: Tensor) -> Tensor:
    """The terms of `KL(p || q)` from the gap `log p - log q`: `p gap + q - p`; no term is below 0."""
    # Near agreement the rounding of a normaliser, which shifts a row of gaps alike, is larger than the divergence. The
    # sum of `q - p` is 0, and as `-(p + q) tanh(gap / 2)` it contains the same shift, which cancels. On a CPU `tanh`
    # takes an eighth of the time of `expm1`, and it is right where either model excludes a token.
    surplus_RV = torch.mul(gap_RV, -0.5).tanh_().mul_(p_RV + q_RV)
    return surplus_RV.addcmul_(gap_RV, p_RV).clamp_(min=0.0)


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
        _check_share("skew", self.skew, "ForwardKL()")

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
        _check_share("skew", self.skew, "ReverseKL()")

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


@final
@dataclass(frozen=True, slots=True)
class TotalVariation(Entrywise):
    """`1/2 sum |p_s - p_t|`, from 0 to 1: the largest difference in the probability of any set of tokens (f-distill,
    arXiv 2307.15190).

    Speculative decoding (arXiv 2211.17192) rejects a token of the student with this probability. The gradient with
    respect to the student's logits is `1/2 p_s (g - E_s[g])` with `g = sign(p_s - p_t)`. It does not become smaller as
    the models come closer.
    """

    def entries(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return (log_student_RV.exp() - log_teacher_RV.exp()).abs() / 2

    def terms(self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor) -> Terms:
        gap_RV = torch.sub(student_RV, teacher_RV, out=log_student_RV)
        slopes_RV = torch.sign(gap_RV, out=log_teacher_RV).mul_(student_RV).mul_(0.5)
        return Terms(gap_RV.abs_().mul_(0.5), slopes_RV)

    def accepted(self, value_R: Tensor) -> Tensor:
        return 1 - value_R


@final
@dataclass(frozen=True, slots=True)
class NegativeLogAcceptance(Divergence):
    """`-log sum min(p_s, p_t)`: minus the logarithm of the probability that speculative decoding accepts a token of
    the student, which is one minus the total variation (LK losses, arXiv 2602.23881).

    The gradient with respect to the student's logits is that of the total variation divided by the acceptance:
    `p_s E_s[r] - p_s r` with `r = [p_s < p_t] / sum min(p_s, p_t)`. No entry is beyond 1, and it does not vanish
    where the models hardly overlap, as that of the total variation does. There is no fused kernel, because a logarithm
    of a sum has no entries.
    """

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        return -torch.minimum(log_student_RV, log_teacher_RV).logsumexp(-1)

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        value_R = self.value(log_student_RV, log_teacher_RV)
        apart_R = torch.sub(student_RV, teacher_RV, out=teacher_RV).abs_().sum(-1).mul_(0.5)
        far_R = apart_R > 0.5
        # Near agreement the logarithm of a sum near 1 would be rounding alone.
        exact_R = torch.where(far_R, value_R, apart_R.neg().log1p().neg())
        # Far apart, slopes are those of tokens that the student underrates, where p_s is at most the acceptance. Near
        # agreement half of p_s / acceptance, at most 1, is added to each, which the softmax takes away: they are 0
        # where both models agree.
        sign_RV = torch.sub(log_student_RV, log_teacher_RV, out=log_teacher_RV).sign_()
        slopes_RV = log_student_RV.add_(value_R.unsqueeze(-1)).clamp_(max=1.0).exp_()
        slopes_RV.mul_(sign_RV.sub_(far_R.unsqueeze(-1).to(sign_RV)).mul_(0.5))
        return exact_R, of_logits_(slopes_RV, student_RV)

    def accepted(self, value_R: Tensor) -> Tensor:
        return value_R.neg().exp()


@final
@dataclass(frozen=True, slots=True)
class TopKTeacher(Divergence):
    """A divergence between two distributions over K + 1 buckets: each of the teacher's K likeliest tokens, and one for
    all others together.

    It is what can be learned from a teacher that reveals only its K likeliest tokens. Both models' buckets add up
    to 1, so a divergence that is never negative is not here either. It is at most that of the whole vocabulary, and
    equal to it with K = V (data processing inequality). Within the last bucket nothing is learned: its
    tokens keep their ratios.

    The gradient with respect to the student's logits, for bucket probabilities `q` and slopes `d = dD / d log q`, is
    `d_v - p_v sum(d)` for a token v of its own, and `p_v (d_rest / q_rest - sum(d))` for the others.

    Args:
        of ([`~losses.divergence.Entrywise`]):
            The divergence between the buckets: any of this package's that compares whole distributions.
        k (`int`):
            K, at least 1; from V on there is no last bucket.

    Raises:
        ValueError: If `k` is below 1, or the divergence is one of sampled tokens or of the user's own.
    """

    needs_whole: ClassVar[bool] = True
    of: Entrywise
    k: int

    def __post_init__(self) -> None:
        if self.k < 1 or not isinstance(self.of, Entrywise):
            raise ValueError(
                f"top_k_teacher is {self.k} with {type(self.of).__name__}: expected at least 1 token, and a divergence "
                "that is a sum over vocabulary entries; your own can select the most likely tokens in `value`."
            )

    def value(self, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
        if self.k >= log_teacher_RV.size(-1):
            return self.of.value(log_student_RV, log_teacher_RV)
        ids_RK = log_teacher_RV.topk(self.k).indices
        return self.of.value(*(_buckets(log_RV, log_RV.exp(), ids_RK) for log_RV in (log_student_RV, log_teacher_RV)))

    def value_and_gradient(
        self, log_student_RV: Tensor, log_teacher_RV: Tensor, student_RV: Tensor, teacher_RV: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.k >= log_teacher_RV.size(-1):
            return self.of.value_and_gradient(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
        ids_RK = log_teacher_RV.topk(self.k).indices
        # The teacher's tokens for both models, so that buckets correspond.
        log_student_RB = _buckets(log_student_RV, student_RV, ids_RK)
        log_teacher_RB = _buckets(log_teacher_RV, teacher_RV, ids_RK)
        student_RB, teacher_RB = log_student_RB.exp(), log_teacher_RB.exp()
        # Chain rule through the buckets: a token of the rest moves its bucket by its share of the bucket's probability.
        values_RB, slopes_RB, _ = self.of.terms(log_student_RB, log_teacher_RB, student_RB, teacher_RB)
        total_R1 = slopes_RB.sum(-1, keepdim=True)
        own_RK = slopes_RB[:, :-1] - student_RV.gather(-1, ids_RK) * total_R1
        rest_R1 = slopes_RB[:, -1:] / student_RB[:, -1:]
        return values_RB.sum(-1), student_RV.mul_(rest_R1 - total_R1).scatter_(-1, ids_RK, own_RK)


def _buckets(log_RV: Tensor, probs_RV: Tensor, ids_RK: Tensor) -> Tensor:
    """Log-probabilities of the K tokens, and of all others together, [R, K + 1]."""
    rest_R1 = probs_RV.scatter(-1, ids_RK, 0.0).sum(-1, keepdim=True)
    least = torch.finfo(rest_R1.dtype).tiny  # others without probability: 0 * log 0 is 0
    return torch.cat([log_RV.gather(-1, ids_RK), rest_R1.clamp(min=least).log()], dim=-1)
