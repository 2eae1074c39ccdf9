"""Clips what each entry of the vocabulary adds to a divergence, so that a few entries do not dominate the gradient.

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


def check_clip(clip: float | None, divergence: Divergence) -> None:
    """Refuses a clip that is out of range, or that goes with a divergence whose entries are not known."""
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
