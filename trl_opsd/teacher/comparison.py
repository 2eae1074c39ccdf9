"""Compares the student with its teachers' targets, on all tokens or on those of each row that score highest.

B rows · C completion tokens · M states that are kept · N tokens in the loss · K that are selected · H hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd.losses import reduce
from trl_opsd.losses.objective import Objective, head_of_reference
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.losses.streamed import streamed_entropy
from trl_opsd.models.backbone import completion_hidden, shape_of
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.types import LazyLogits, LossParts, OutputHead, PerToken, Rollout, Sampled, TeacherTargets
from trl_opsd.types.targets import Arriving, fetch, kept_by_row


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """N tokens in a loss that one teacher has scored, by row and position; tensors in host memory until selected."""

    by_token: ClassVar[bool] = True
    """Whether each has a target, which is a distribution over tokens; else some of weight 0 may be among them."""

    teacher: int
    """Its number."""
    places_N: Tensor
    """Indices of the tokens in [B * C], int64."""
    weights_BC: Tensor
    """The weights of these tokens, 0 for all others."""
    weights_N: Tensor | None
    """The weights of these tokens alone; `None` if all are 1, which saves a product with each logit's gradient."""
    kept: Arriving
    """The teacher's states of these tokens and possibly of others, while they are copied."""
    kept_N: Tensor | None
    """Indices of these tokens in `kept`, int64; `None` if they are all of it."""
    reference_states: Mapping[str, Arriving] = field(default_factory=dict)
    """As `kept`, in other contexts or of another model, by what the states are for."""
    highest_K: Tensor | None = None
    """[K], int64: indices to select once the tokens of each row are sorted by score; `None` for no selection."""

    def of_student(self, hidden_BCH: Tensor, device: torch.device) -> Tensor:
        """The student's states of these tokens, [N, H], on a device; differentiable."""
        return selected(hidden_BCH.flatten(0, 1), self.places_N).to(device, non_blocking=True)

    def of_tokens(self, rollout: Rollout, device: torch.device) -> Sampled:
        """These tokens and how they were sampled, on a device."""

        def at_places(each_BC: Tensor) -> Tensor:
            return selected(each_BC.flatten(), self.places_N).to(device, non_blocking=True)

        pull_B, logprobs_BC = rollout.nll_weight, rollout.logprobs
        return Sampled(
            at_places(rollout.completion_ids),
            None if pull_B is None else at_places(pull_B[:, None].expand(-1, rollout.completion_ids.size(1))),
            None if logprobs_BC is None else at_places(logprobs_BC),
        )

    def of_teacher(self, device: torch.device, reference: str = "") -> Tensor:
        """The teacher's states of these tokens, or a reference's, [N, H], on a device; copied only from another."""
        kept_MH = (self.reference_states[reference] if reference else self.kept).wait()
        return (kept_MH if self.kept_N is None else selected(kept_MH, self.kept_N)).to(device)

    def compared(self, objective: Objective, *given: Any) -> PerToken:
        """The divergence of these tokens, of what [`~losses.objective.Objective.of`] takes."""
        return objective.of(*given)


def tokens_by_teacher(
    heads: Sequence[OutputHead],
    targets: TeacherTargets,
    weights_BC: Tensor,
    selection: Any = None,
    host_BC: Tensor | None = None,
    origin: OutputHead | None = None,
    by_token: bool = True,
) -> list[TeacherTokens]:
    """Splits the tokens in a loss by teacher, and starts to copy their targets, beside the student's forward.

    Unless they are `by_token`, some tokens may have no target, and others several.
    """
    # Without a copy of the weights in host memory, this waits for the device.
    host_BC = weights_BC.cpu() if host_BC is None else host_BC
    rows = kept_by_row(targets, weights_BC).rows or ()
    numbers = [0] * len(rows) if targets.teacher is None else targets.teacher.tolist()
    found = []
    for number, head in enumerate(heads if targets.teacher is not None else heads[:1]):
        theirs = [row for row, one in enumerate(numbers) if one == number]
        theirs_BC = host_BC if targets.teacher is None else host_BC * (targets.teacher == number).unsqueeze(1)
        places_N = theirs_BC.flatten().nonzero().squeeze(1)
        # A teacher without a token is left out, but for the first, so that there is always a loss.
        if number and not len(places_N):
            continue
        kept_at_M = torch.cat([places_N[:0], *(rows[row].places + row * host_BC.size(1) for row in theirs)])
        counts_M = theirs_BC.flatten()[kept_at_M] != 0
        if by_token and (missing := len(places_N) - int(counts_M.sum())) > 0:
            raise ValueError(
                f"{missing} tokens have a weight in the loss but no target: they are padding, or were not generated by "
                "the student. Keep their weights at 0."
            )
        weights_N = theirs_BC.flatten()[places_N]
        # Without a row, an empty tensor of the teacher's width stands for its states.
        kept = [rows[row].hidden for row in theirs] or [_no_states(head)]
        if targets.teacher is not None:
            kept = [_as_of(head, states) for states in kept]
        reference_states = {
            name: fetch(
                [one[row].hidden for row in theirs] or [_no_states(head_of_reference(name, head, origin))],
                weights_BC.device,
            )
            for name, one in targets.reference_states.items()
        }
        found.append(
            TeacherTokens(
                teacher=number,
                places_N=places_N,
                weights_BC=theirs_BC,
                weights_N=None if bool((weights_N == 1).all()) else weights_N,
                kept=fetch(kept, weights_BC.device),
                kept_N=None if bool(counts_M.all()) else counts_M.nonzero().squeeze(1),
                reference_states=reference_states,
                highest_K=None if selection is None else _highest(theirs_BC, selection),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """A micro-batch that the student has read, with the targets of its teachers."""

    rollout: Rollout
    targets: TeacherTargets
    shares: Sequence[TeacherTokens]
    hidden_BCH: Tensor
    """The student's states, differentiable."""
    nats: Callable[..., Tensor] | None = None
    """[n], the divergence at some places of a row, where there is no distribution of the teacher over tokens."""


def by_token(
    teacher: Any, student: CausalLM, rollout: Rollout, targets: TeacherTargets, objective: Objective,
    policy: BatchPolicy, heads: Sequence[OutputHead], origin: OutputHead | None,
) -> Comparison:  # fmt: skip
    """Has the student read a micro-batch, to be compared with its targets token by token. No collectives in it.

    The first of several teachers is asked for all; `heads` are theirs, and `origin` as of [`compared`].
    """
    # First, as these reads wait for the device, which has no work queued yet.
    host_BC = rollout.weights_on_host()
    shares = tokens_by_teacher(heads, targets, rollout.weights, objective.selection, host_BC, origin)
    return Comparison(rollout, targets, shares, completion_hidden(student, rollout, policy))


def _highest(weights_BC: Tensor, selection: Any) -> Tensor:
    """The first indices of each row, as many as are selected."""
    tokens_B = (weights_BC != 0).sum(1).tolist()
    starts_B = accumulate(tokens_B, initial=0)
    each = [range(start, start + selection.kept(tokens)) for start, tokens in zip(starts_B, tokens_B, strict=False)]
    return torch.tensor(list(chain.from_iterable(each)), dtype=torch.long)


def selected(states_MH: Tensor, places_N: Tensor) -> Tensor:
    return states_MH.index_select(0, places_N.to(states_MH.device, non_blocking=True))


def _no_states(head: OutputHead) -> Tensor:
    return torch.empty(0, shape_of(head)[1], dtype=head.weight.dtype, device=head.weight.device)


def _as_of(head: OutputHead, states_nH: Tensor) -> Tensor:
    """Restores width and dtype of one teacher's states, if all teachers' were joined in one block of the widest."""
    # Padding and float32 come from joining teachers of different widths and dtypes.
    own_nH = states_nH[:, : shape_of(head)[1]]
    return own_nH.to(head.weight.dtype) if own_nH.dtype == torch.float32 else own_nH


def best(share: TeacherTokens, scores_N: Tensor) -> TeacherTokens:
    """The tokens of each row with the highest scores, earlier ones first among equals, without waiting for a device."""
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
    comparison: Comparison,
    head: OutputHead,
    teacher_heads: Sequence[OutputHead],
    num_items: Tensor | float | None,
    objective: Objective,
    origin: OutputHead | None = None,
) -> LossParts:
    """The loss of a micro-batch, without waiting for a device.

    `origin` is the head of the student as it was passed, if targets have its states.
    """
    rollout, shares, hidden_BCH = comparison.rollout, comparison.shares, comparison.hidden_BCH
    # The denominator is that of the whole optimizer step; without one, of this micro-batch.
    if num_items is None:
        num_items = sum(float(share.weights_BC.sum()) for share in shares) or 1.0
    device, how = head.weight.device, (objective.chunk_tokens, objective.vocabulary)

    def of(share: TeacherTokens, sampled: Sampled, objective: Objective = objective) -> PerToken:
        teacher_head = teacher_heads[share.teacher]
        weights_N = None if share.weights_N is None else share.weights_N.to(device, non_blocking=True)
        student_NH, teacher_NH = share.of_student(hidden_BCH, device), share.of_teacher(device)
        reference_states = {
            name: (share.of_teacher(device, name), head_of_reference(name, teacher_head, origin))
            for name in share.reference_states
        }
        pair = (student_NH, head), (teacher_NH, teacher_head)
        return share.compared(objective, *pair, weights_N, sampled, reference_states)

    def student_of(share: TeacherTokens) -> LazyLogits:
        return LazyLogits(share.of_student(hidden_BCH, device), head, objective.temperatures[0])

    def teacher_of(share: TeacherTokens) -> LazyLogits:
        return LazyLogits(share.of_teacher(device), teacher_heads[share.teacher], objective.temperatures[1])

    @torch.no_grad()
    def scores(share: TeacherTokens, criterion: str) -> Tensor:
        if criterion == "teacher_divergence":
            sampled = replace(share.of_tokens(rollout, device), nll_weight=None)
            # Scored by the unweighted divergence from the target alone, without `nll` or anchor.
            alone = replace(objective, anchor_weight=0.0)
            found_N = of(replace(share, weights_N=None), sampled, alone).divergence
            # A log ratio has either sign.
            return found_N.abs() if isinstance(objective.divergence, SampledReverseKL) else found_N
        if criterion == "teacher_confidence":
            return -streamed_entropy(teacher_of(share), *how)
        ids_N = share.of_tokens(rollout, device).ids if criterion == "student_surprise" else None
        return streamed_entropy(student_of(share), *how, ids_N)

    @torch.no_grad()
    def factored(share: TeacherTokens, sampled: Sampled, factors: Callable[..., Tensor]) -> TeacherTokens:
        places_N, shape = share.places_N.to(device, non_blocking=True), share.weights_BC.shape
        mine_N, theirs_N = (-streamed_entropy(one(share), *how, sampled.ids) for one in (student_of, teacher_of))
        drawn_N = mine_N if sampled.logprobs is None else mine_N.where(sampled.logprobs.isnan(), sampled.logprobs)
        each_BC = (
            one.new_zeros(shape.numel()).index_copy(0, places_N, one).view(shape) for one in (mine_N, theirs_N, drawn_N)
        )
        weights_N = selected(factors(*each_BC).flatten(), places_N)
        if share.weights_N is not None:
            weights_N = weights_N * share.weights_N.to(device, non_blocking=True)
        return replace(share, weights_N=weights_N)

    # A part of a completion has no positions within the whole, so sums by tenth are not computed.
    real = None if rollout.begins_at is not None else rollout.completion_mask
    parts: LossParts | None = None
    for share in shares:
        if objective.selection is not None:
            share = best(share, scores(share, objective.selection.criterion))
        sampled = share.of_tokens(rollout, device)
        if objective.factors is not None:
            share = factored(share, sampled, objective.factors)
        per_token = of(share, sampled)
        places_N = None if share.by_token else share.places_N
        part = reduce(per_token, share.weights_BC, num_items, real, places_N, rollout.authors)
        parts = part if parts is None else parts + part
    assert parts is not None, "there is a teacher"
    return parts
