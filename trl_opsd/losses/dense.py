"""The reference divergence: all logits, float64, autograd. The streamed one is defined to equal it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_opsd.losses.completed import complete_
from trl_opsd.losses.divergence import Divergence, Entrywise
from trl_opsd.losses.elementwise import FARTHEST, top_shared_
from trl_opsd.losses.sampled import SampledReverseKL, against_sampler, drawn
from trl_opsd.losses.validation import check_arguments
from trl_opsd.types import LazyLogits, PerToken, ReferenceModel, Sampled
from trl_opsd.types.known import KnownTokens, TokenHead


def dense_divergence(
    student: LazyLogits,
    teacher: LazyLogits,
    divergence: Divergence,
    weights: Tensor | None = None,
    chunk_tokens: int | None = None,
    vocabulary: int | None = None,
    kl_clip: float | None = None,
    sampled: Sampled | None = None,
    references: Sequence[ReferenceModel] = (),
    anchor: Divergence | None = None,
) -> PerToken:
    """What [`streamed_divergence`] must equal, with the `N x V` logits of both models in memory, in float64.

    Arguments and errors are those of [`streamed_divergence`]; `chunk_tokens` has no effect here, and the likeliest
    tokens are ranked everywhere.
    """
    check_arguments(student, teacher, divergence, weights, vocabulary, kl_clip, sampled, references, anchor)
    log_student_NV = _log_probs(student, vocabulary)
    if isinstance(teacher.head, TokenHead):
        log_teacher_NV = log_student_NV.detach().clone()
        complete_(log_teacher_NV, KnownTokens.unpack(teacher.hidden.double()))
        log_teacher_NV = log_teacher_NV.log_softmax(-1)
    else:
        log_teacher_NV = _log_probs(teacher, vocabulary).detach()
    log_references = [_log_probs(one.logits, vocabulary).detach() for one in references]
    target_NV = log_teacher_NV
    for one, log_NV in zip(references, log_references, strict=True):
        gap_NV = log_teacher_NV - log_NV
        if one.bound is not None:
            gap_NV = one.bound * (gap_NV / one.bound).tanh()
        elif teacher.head.bias is not None or one.logits.head.bias is not None:
            gap_NV = gap_NV.clamp(-FARTHEST, FARTHEST)
        target_NV = target_NV + one.push * gap_NV
    log_teacher_NV = target_NV.log_softmax(-1)
    logs = log_student_NV, log_teacher_NV
    clipped_N, nll_N = log_student_NV.new_zeros(2, len(log_student_NV))
    first_N = importance_N = kl_N = known_N = None
    if sampled is not None:
        chosen = [log_NV.gather(-1, sampled.ids[:, None]).squeeze(-1) for log_NV in logs]
        value_N, nll_N, importance_N, _ = drawn(divergence, sampled, *chosen)
        if sampled.logprobs is not None:
            kl_N, known_N = against_sampler(chosen[0], sampled.logprobs)
        first_N = (chosen[1] == log_teacher_NV.amax(-1)).float()
    if not isinstance(divergence, SampledReverseKL):
        value_N = divergence.value(*logs)
    if kl_clip is not None:
        assert isinstance(divergence, Entrywise), "check_clip has refused others"
        entries_NV = divergence.entries(*logs)
        value_N, clipped_N = entries_NV.clamp(max=kl_clip).sum(-1), (entries_NV > kl_clip).any(-1)
    shared_N, mass_N = top_shared_(torch.stack([log_student_NV.detach(), log_teacher_NV]))
    is_whole = kl_clip is None and not any(one.push for one in references)
    weights_N = torch.ones_like(value_N) if weights is None else weights
    anchors = [
        one.anchor * (anchor or divergence).value(log_student_NV, log_NV)
        for one, log_NV in zip(references, log_references, strict=True)
        if one.anchor
    ]
    anchored_N = torch.stack(anchors).sum(0) if anchors else torch.zeros_like(value_N)
    return PerToken(
        divergence=(weights_N * (value_N + nll_N + anchored_N)).float(),
        student_entropy=_entropy(log_student_NV.detach()),
        teacher_entropy=_entropy(log_teacher_NV),
        teacher_uniform=log_teacher_NV.amax(-1) == log_teacher_NV.amin(-1),
        clipped=clipped_N.float(),
        nll=(weights_N * nll_N).detach().float(),
        anchored=(weights_N * anchored_N).detach().float() if anchors else None,
        same_first=(log_student_NV.argmax(-1) == log_teacher_NV.argmax(-1)).float(),
        teacher_first=first_N,
        importance=importance_N,
        gated=None if importance_N is None else (importance_N == 0).float(),
        sampler_kl=kl_N,
        sampler_known=known_N,
        ranked=torch.ones_like(shared_N),
        top_shared=shared_N,
        top_mass=mass_N,
        accepted=divergence.accepted(value_N.detach().float()) if is_whole else None,
    )


def _log_probs(lazy: LazyLogits, vocabulary: int | None) -> Tensor:
    head = lazy.head
    logits_NV = lazy.hidden.double() @ head.weight.double().T
    logits_NV = head.scale * (logits_NV if head.bias is None else logits_NV + head.bias.double())
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    # A column at -inf has probability 0; a finite floor keeps 0 * log 0 at 0, in the value and in the gradient.
    logits_NV = logits_NV[:, :vocabulary] / lazy.temperature
    return torch.log_softmax(logits_NV.clamp(min=torch.finfo(torch.float64).min), dim=-1)


def _entropy(log_p_NV: Tensor) -> Tensor:
    return -(log_p_NV.exp() * log_p_NV).sum(-1).float()
