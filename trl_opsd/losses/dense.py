"""The reference divergence: all logits, float64, autograd. The streamed one is defined to equal it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence, Entrywise
from trl_opsd.losses.elementwise import gap, top_shared_
from trl_opsd.losses.sampled import SampledReverseKL, drawn
from trl_opsd.losses.validation import check_arguments
from trl_opsd.types import Beside, LazyLogits, PerToken, Sampled


def dense_divergence(
    student: LazyLogits,
    teacher: LazyLogits,
    divergence: Divergence,
    weights: Tensor | None = None,
    chunk_tokens: int | None = None,
    vocabulary: int | None = None,
    kl_clip: float | None = None,
    sampled: Sampled | None = None,
    beside: Sequence[Beside] = (),
    anchor: Divergence | None = None,
) -> PerToken:
    """What [`streamed_divergence`] must equal, with the `N x V` logits of both models in memory, in float64.

    Arguments and errors are those of [`streamed_divergence`]; `chunk_tokens` has no effect here, and the likeliest
    tokens are ranked everywhere.
    """
    check_arguments(student, teacher, divergence, weights, vocabulary, kl_clip, sampled, beside, anchor)
    log_student_NV = _log_probs(student, vocabulary)
    log_teacher_NV = _log_probs(teacher, vocabulary).detach()
    log_besides = [_log_probs(one.logits, vocabulary).detach() for one in beside]
    target_NV = log_teacher_NV
    for one, log_NV in zip(beside, log_besides, strict=True):
        target_NV = target_NV + one.push * gap(log_teacher_NV, log_NV, one.bound)
    log_teacher_NV = target_NV.log_softmax(-1)
    logs = log_student_NV, log_teacher_NV
    clipped_N, pulled_N = torch.zeros(2, len(log_student_NV), dtype=torch.float64)
    first_N = importance_N = None
    if sampled is not None:
        chosen = [log_NV.gather(-1, sampled.ids[:, None]).squeeze(-1) for log_NV in logs]
        value_N, pulled_N, importance_N, _ = drawn(divergence, sampled, *chosen)
        first_N = (chosen[1] == log_teacher_NV.amax(-1)).float()
    if not isinstance(divergence, SampledReverseKL):
        value_N = divergence.value(*logs)
    if kl_clip is not None:
        assert isinstance(divergence, Entrywise), "check_clip has refused others"
        entries_NV = divergence.entries(*logs)
        value_N, clipped_N = entries_NV.clamp(max=kl_clip).sum(-1), (entries_NV > kl_clip).any(-1)
    shared_N, mass_N = top_shared_(torch.stack([log_student_NV.detach(), log_teacher_NV]))
    weights_N = torch.ones_like(value_N) if weights is None else weights
    anchors = [
        one.anchor * (anchor or divergence).value(log_student_NV, log_NV)
        for one, log_NV in zip(beside, log_besides, strict=True)
        if one.anchor
    ]
    anchored_N = torch.stack(anchors).sum(0) if anchors else torch.zeros_like(value_N)
    return PerToken(
        divergence=(weights_N * (value_N + pulled_N + anchored_N)).float(),
        student_entropy=_entropy(log_student_NV.detach()),
        teacher_entropy=_entropy(log_teacher_NV),
        teacher_uniform=log_teacher_NV.amax(-1) == log_teacher_NV.amin(-1),
        clipped=clipped_N.float(),
        pulled=(weights_N * pulled_N).detach().float(),
        anchored=(weights_N * anchored_N).detach().float() if anchors else None,
        same_first=(log_student_NV.argmax(-1) == log_teacher_NV.argmax(-1)).float(),
        teacher_first=first_N,
        importance=importance_N,
        ranked=torch.ones_like(shared_N),
        top_shared=shared_N,
        top_mass=mass_N,
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
