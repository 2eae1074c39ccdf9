"""Compares the student with its teachers' targets, on all tokens or on those of each row that score highest.

B rows · C completion tokens · N tokens in the loss · K of them that are selected · H hidden width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trl_opsd.losses import reduce
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.losses.streamed import Objective, streamed_entropy
from trl_opsd.teacher.routing import Share
from trl_opsd.types import LazyLogits, LossParts, OutputHead, PerToken, Rollout, Sampled


def best(share: Share, scores_N: Tensor) -> Share:
    """The tokens of each row with the highest scores, of equal ones the first, without waiting for a device."""
    device, (rows, columns) = scores_N.device, share.weights_BC.shape
    assert share.highest_K is not None, "made with a selection"
    places_N = share.places_N.to(device, non_blocking=True)
    # A score that is NaN or infinite sorts first, so that the fault reaches the loss.
    by_score_N = scores_N.argsort(descending=True, stable=True)
    # Sorted by score and then stably by row, each row's highest come first, at indices known on the host.
    by_row_N = by_score_N[(places_N[by_score_N] // columns).argsort(stable=True)]
    best_K = by_row_N[share.highest_K.to(device, non_blocking=True)].sort().values
    places_K, total_B = places_N[best_K], share.weights_BC.sum(1).to(device, non_blocking=True)
    weights_K = share.weights_BC.flatten()[share.places_N].to(device, non_blocking=True)[best_K]
    rows_K = places_K // columns
    # The selected weights keep their ratios and are scaled to the sum of all weights of their row.
    kept_B = weights_K.new_zeros(rows).index_add(0, rows_K, weights_K)
    weights_K = weights_K * (total_B / kept_B)[rows_K]
    weights_BC = weights_K.new_zeros(rows * columns).index_copy(0, places_K, weights_K).view(rows, columns)
    return replace(
        share,
        places_N=places_K,
        weights_BC=weights_BC,
        weights_N=weights_K,
        kept_N=best_K if share.kept_N is None else share.kept_N.to(device, non_blocking=True)[best_K],
        highest_K=None,
    )


def compared(
    hidden_BCH: Tensor,
    head: OutputHead,
    teacher_heads: Sequence[OutputHead],
    shares: Sequence[Share],
    rollout: Rollout,
    num_items: Tensor | float | None,
    objective: Objective,
    criterion: str | None = None,
) -> LossParts:
    """The loss of a micro-batch, without waiting for a device; `criterion` is one of `token_selection.LATE`."""
    # The denominator is that of the whole optimizer step; without one, of this micro-batch.
    if num_items is None:
        num_items = sum(float(share.weights_BC.sum()) for share in shares) or 1.0
    device = head.weight.device

    def of(share: Share, sampled: Sampled) -> PerToken:
        teacher_head = teacher_heads[share.teacher]
        weights_N = None if share.weights_N is None else share.weights_N.to(device, non_blocking=True)
        student_NH, teacher_NH = share.of_student(hidden_BCH, device), share.of_teacher(teacher_head.weight.device)
        return objective.of((student_NH, head), (teacher_NH, teacher_head), weights_N, sampled)

    @torch.no_grad()
    def scores(share: Share, criterion: str) -> Tensor:
        if criterion == "teacher_divergence":
            sampled = replace(share.of_tokens(rollout, device), pull=None)
            # Scored by the unweighted divergence alone, without the pull.
            found_N = of(replace(share, weights_N=None), sampled).divergence
            return (
                found_N.abs() if isinstance(objective.divergence, SampledReverseKL) else found_N
            )  # a log ratio, either sign
        logits = LazyLogits(share.of_student(hidden_BCH, device), head, objective.temperatures[0])
        return streamed_entropy(logits, objective.chunk_tokens, objective.vocabulary)

    # A part of a completion has no positions within the whole, so sums by tenth are not computed.
    real = None if rollout.begins_at is not None else rollout.completion_mask
    parts: LossParts | None = None
    for share in shares:
        scored_2 = None
        if criterion is not None:
            scores_N = scores(share, criterion)
            scored_2 = torch.stack([scores_N.new_tensor(len(scores_N)), scores_N.sum()])
            share = best(share, scores_N)
        per_token = of(share, share.of_tokens(rollout, device))
        part = replace(reduce(per_token, share.weights_BC, num_items, real), scored=scored_2)
        parts = part if parts is None else parts + part
    assert parts is not None, "there is a teacher"
    return parts
