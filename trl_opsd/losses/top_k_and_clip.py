"""A divergence of the teacher's K likeliest tokens and one bucket of all others, and a clip on what each entry adds.

R rows (tokens) · V vocabulary size · K + 1 buckets; log-probabilities in nats
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence, Entrywise, of_logits_


@final
@dataclass(frozen=True, slots=True)
class TopKTeacher(Divergence):
    """A divergence between two distributions over K + 1 buckets: each of the teacher's K likeliest tokens, and one for
    all others together.

    It is what can be learned from a teacher that reveals only its K likeliest tokens. Both models' buckets add up
    to 1, so a divergence that is never negative is not here either. It is at most that of the whole vocabulary, and
    equal to it with K = V (data processing inequality; of an f-divergence, which `AdaptiveKL` is not). Within the last
    bucket nothing is learned: its tokens keep their ratios.

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

    of: Entrywise
    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"top_k_teacher is {self.k}, expected a number of tokens, at least 1.")
        if not isinstance(self.of, Entrywise):
            raise ValueError(
                f"top_k_teacher is {self.k} with {type(self.of).__name__}, which is not computed from entries: choose "
                "a divergence of this package that reads whole distributions, or take the likeliest tokens in `value`."
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


def clipped_value(divergence: Entrywise, clip: float, log_student_RV: Tensor, log_teacher_RV: Tensor) -> Tensor:
    """The definition: the sum of all entries, each at most `clip`. [R], differentiable, in any precision."""
    return divergence.entries(log_student_RV, log_teacher_RV).clamp(max=clip).sum(-1)


def clipped_(
    divergence: Entrywise,
    clip: float,
    log_student_RV: Tensor,
    log_teacher_RV: Tensor,
    student_RV: Tensor,
    teacher_RV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped value [R], its gradient for the student's logits [R, V], and whether an entry was clipped [R]."""
    # Overwrites the log-probabilities. The value may be negative: entries below 0 are left as they are.
    terms_RV, slopes_RV, drift = divergence.terms(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
    # The clip applies to entries, not to terms, which contain the drift as well.
    shift_RV = (student_RV - teacher_RV).mul_(drift)
    cut_RV = terms_RV - shift_RV > clip
    # A clipped entry becomes the constant `clip`, so only the drift that makes it a term keeps a slope. The sum of
    # slopes that the softmax subtracts is therefore that of the unclipped entries alone.
    terms_RV = torch.where(cut_RV, shift_RV.add_(clip), terms_RV)
    slopes_RV = torch.where(cut_RV, student_RV * drift, slopes_RV)
    return terms_RV.sum(-1), of_logits_(slopes_RV, student_RV), cut_RV.any(-1)
