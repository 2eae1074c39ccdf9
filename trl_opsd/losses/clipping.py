"""Clips what each token of the vocabulary adds to a divergence, so that a few of them do not decide the gradient.

R rows (tokens) · V vocabulary size; log-probabilities in nats
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence, Entrywise, of_logits_
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.losses.top_k import TopKTeacher


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
    """The clipped value [R], its gradient with respect to the student's logits [R, V], and whether an entry of the row
    was clipped, [R]; overwrites the log-probabilities.

    Only entries that are not clipped have a slope, so the sum over the vocabulary that a softmax subtracts is theirs
    alone. The value may be negative: entries below 0 are left as they are.
    """
    terms_RV, slopes_RV, drift = divergence.terms(log_student_RV, log_teacher_RV, student_RV, teacher_RV)
    shift_RV = (student_RV - teacher_RV).mul_(drift)
    cut_RV = terms_RV - shift_RV > clip
    # The clip in place of the entry, and the slope of what makes an entry a term: nothing else of the row is changed.
    terms_RV = torch.where(cut_RV, shift_RV.add_(clip), terms_RV)
    slopes_RV = torch.where(cut_RV, student_RV * drift, slopes_RV)
    return terms_RV.sum(-1), of_logits_(slopes_RV, student_RV), cut_RV.any(-1)


def check_clip(clip: float | None, divergence: Divergence) -> None:
    """Refuses a clip that is out of range, or of a divergence whose entries are not known.

    Raises:
        ValueError: It is not above 0, or the divergence is one of the user's own.
    """
    if clip is None:
        return
    if not clip > 0:
        raise ValueError(f"kl_clip is {clip}, expected a number above 0, in nats: leave it out for no clip.")
    if isinstance(divergence, SampledReverseKL):
        raise ValueError(
            f"kl_clip is {clip} with SampledReverseKL, which reads the sampled token alone and has no entries to clip: "
            "leave `kl_clip` out, or use ReverseKL()."
        )
    if isinstance(divergence, TopKTeacher):
        raise ValueError(
            f"kl_clip is {clip} with {divergence!r}: a bucket of many tokens is no entry to clip. Set only one of "
            "`kl_clip` and `top_k_teacher`."
        )
    if not isinstance(divergence, Entrywise):
        raise ValueError(
            f"kl_clip is {clip} with {type(divergence).__name__}, of which only the sum over the vocabulary is known: "
            "clip in its `value`, before that sum, with `clamp(max=...)`, and leave `kl_clip` out."
        )
