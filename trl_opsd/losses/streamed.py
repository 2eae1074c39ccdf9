"""Folds a divergence over tiles of a few tokens and the whole vocabulary, so no batch of logits ever exists in full.

N tokens in the loss · C tokens of a tile · G tokens of a group · R rows of a block · V vocabulary size · H hidden size

With the whole vocabulary in a tile its normalisers are known at once, so nothing is projected twice: one product per
model for the logits, one for the gradient of the hidden states, one for that of the head. Both gradients are formed in
the forward pass, where the logits are; the backward pass only scales them. (Tiles of a part of the vocabulary would
have to be projected again.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_opsd.losses.completed import CompletedSide
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.elementwise import EVERY, STATISTICS, Finish, eager_, looked_at, top_shared_
from trl_opsd.losses.kernels import step_for
from trl_opsd.losses.sampled import against_sampler
from trl_opsd.losses.side import STRIDE_ELEMENTS, Side, product_dtype
from trl_opsd.losses.target import is_sum, project_target_
from trl_opsd.losses.validation import check_arguments
from trl_opsd.types import LazyLogits, PerToken, ReferenceModel, Sampled
from trl_opsd.types.known import LEAST, KnownTokens, TokenHead

TILE_BYTES = 600_000_000
"""Memory limit of all tiles of one call when `chunk_tokens` is `None`, in bytes; more on a large accelerator."""
_TILE_SHARE = 0.015
"""Share of an accelerator's memory for tiles: a tile twice as large reads both heads half as often."""
_TILE_MULTIPLE = 16
"""Tiles have a multiple of so many tokens on an accelerator, whose matrix kernels are specialised for shapes."""
_GROUP_TILES = 4
"""Tiles whose low-precision gradient is collected before it is multiplied into the head's. Reading and writing the
head's gradient once per tile would cost more than the product: at 790 TFLOP/s and 4.3 TB/s, for any tile under 735
tokens."""
_BLOCK_ELEMENTS = {"cpu": 1 << 17}
"""Logits of a block, which goes through all elementwise steps before the next: on a CPU, as many as fit its cache."""
_BLOCK_ELEMENTS_ELSEWHERE = 1 << 24
_PULLED = 5
"""Index of the part of `nll` among the statistics of a step."""
_ROUNDING = 1e-6
"""Logits count as equal if they are at most so far below the largest on average: the rounding of their products. A
model whose logits spread by only 1e-2, as a tiny random one's do, stays above it up to a temperature of 10,000."""


@cache
def memory_of(device: torch.device) -> int:
    """Bytes of an accelerator; 0 for a CPU, and where it cannot be queried (MPS)."""
    try:
        return 0 if device.type == "cpu" else torch.accelerator.get_memory_info(device)[1]
    except RuntimeError:
        return 0


def tile_bytes(memory: int) -> int:
    """Byte limit for all tiles of one call; `memory` is the device's, 0 for a CPU."""
    return max(TILE_BYTES, int(_TILE_SHARE * memory))


def tile_of(tokens: int, token_bytes: int, memory: int) -> int:
    """Tokens of a tile within [`tile_bytes`], at least 1."""
    most = tile_bytes(memory) // token_bytes
    if memory and most >= _TILE_MULTIPLE:
        most -= most % _TILE_MULTIPLE
    return max(1, min(tokens, most))


def streamed_divergence(
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
    """The per-token divergence between two models, without materialising either model's logits in full.

    Equals [`dense_divergence`]. Statistics are float32 whatever the inputs' dtype; products run in the wider dtype of
    hidden states and head, or in autocast's, and accumulate in float32. Gradients flow to the student's hidden states,
    head weight and head bias, each in its own dtype, and never to the teacher. A gradient that is not required is not
    computed.

    The gradient of the hidden states is valid for any upstream gradient. The head's is summed over tokens in the
    forward pass, so it is valid for an upstream gradient that is the same for all tokens: that of `divergence.sum()`,
    however scaled. Any other gives correct results too, but computes the head's gradient a second time (2S + 1T, in
    products with the student's and the teacher's head). On an accelerator, where comparing values would wait for the
    device, only the expanded gradient of `sum` is recognised: write `divergence.sum() / n` for `divergence.mean()`, and
    pass `weights` here instead of multiplying afterwards.

    Args:
        student ([`LazyLogits`]):
            Hidden states [N, H_s] and head [V, H_s].
        teacher ([`LazyLogits`]):
            Hidden states [N, H_t] and head [V, H_t]; its hidden size may differ. With a [`~types.known.TokenHead`],
            what is known of its tokens; all others share their probability as in the student.
        divergence ([`Divergence`]):
            One of [`DIVERGENCES`], or one of your own.
        weights (`torch.Tensor`, *optional*):
            [N], constants that multiply the divergence of each token.
        chunk_tokens (`int`, *optional*):
            Tokens whose logits exist at a time. By default as many as keep the tiles within 0.6 GB, or
            1.5 % of an accelerator's memory if that is more.
        vocabulary (`int`, *optional*):
            Number of token ids that both models share: the first rows of both heads. The other rows, padding of one
            model or the other, have probability 0 on both sides and a gradient of 0, as if both heads ended there. When
            `None`, all rows are used and both heads must have the same number.
        kl_clip (`float`, *optional*):
            Most that each token of the vocabulary may add, in nats. Only for the divergences of this package.
        sampled ([`~types.Sampled`], *optional*):
            The token that was sampled at each position, and the weight of `-log p` there. Needed by
            [`SampledReverseKL`].
        references (sequence of [`~types.ReferenceModel`], *optional*):
            Further models, each for one more product: what the target moves away from, and an anchor.
        anchor ([`Divergence`], *optional*):
            The divergence from the anchor; when `None`, `divergence`.

    Returns:
        [`PerToken`]: in nats; `inf` where one model excludes a token that the other expects, `nan` where the gradient
        is not finite, though the divergence is.

    Raises:
        ValueError: If shapes, devices or settings are incompatible.
    """
    check_arguments(student, teacher, divergence, weights, vocabulary, kl_clip, sampled, references, anchor)
    references = [one for one in references if one.push or one.anchor]
    dtypes = tuple(map(product_dtype, (student, teacher, *(one.logits for one in references))))
    anchor = anchor or divergence
    fold = _Fold(student, teacher, divergence, kl_clip, sampled, dtypes, chunk_tokens, vocabulary, references, anchor)
    value_N, student_entropy_N, teacher_entropy_N, mean_ratio_N, clipped_N, nll_N, *others = folded(fold, weights)
    same_N, first_N, *of_some = others
    importance_N, log_sampled_N, ranked_N, shared_N, mass_N, anchored_N, accepted_N = of_some
    logprobs_N = None if sampled is None else sampled.logprobs
    kl_N, known_N = (None, None) if logprobs_N is None else against_sampler(log_sampled_N, logprobs_N)
    return PerToken(
        divergence=value_N,
        student_entropy=student_entropy_N,
        teacher_entropy=teacher_entropy_N,
        teacher_uniform=mean_ratio_N > 1 - _ROUNDING,
        clipped=clipped_N,
        nll=nll_N,
        anchored=anchored_N if any(one.anchor for one in references) else None,
        same_first=same_N,
        teacher_first=None if sampled is None else first_N,
        importance=importance_N,
        gated=(importance_N == 0).float(),
        sampler_kl=kl_N,
        sampler_known=known_N,
        ranked=ranked_N,
        top_shared=shared_N,
        top_mass=mass_N,
        accepted=accepted_N,
    )


def folded(fold: Any, weights: Tensor | None) -> tuple[Any, ...]:
    """The statistics of a pass over tokens with these weights; the first has a graph where the student needs one."""
    inputs = (fold.student.hidden, fold.student.head.weight, fold.student.head.bias)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        found: tuple[Any, ...] = _Streamed.apply(*inputs, weights, fold)
        return found
    with torch.no_grad():
        return fold.run(weights, (False, False, False))[0]


class _Streamed(torch.autograd.Function):
    """Computes the gradient in the forward pass and only scales it in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, fold: _Fold
    ) -> tuple[Tensor | None, ...]:
        statistics, (ctx.hidden_gradient, *ctx.head_gradient) = fold.run(weights, ctx.needs_input_grad[:3])
        if any(ctx.needs_input_grad[1:3]):
            ctx.fold, teacher = fold, fold.teacher
            ctx.save_for_backward(weights, hidden, weight, bias, teacher.hidden, teacher.head.weight, teacher.head.bias)
        ctx.mark_non_differentiable(*(one for one in statistics[1:] if one is not None))
        return statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # The hidden states' gradient is a row per token and can be scaled by any upstream gradient; the head's is
        # summed over tokens already.
        hidden_NH, head = ctx.hidden_gradient, ctx.head_gradient
        if hidden_NH is not None:
            hidden_NH = hidden_NH * upstream_N.unsqueeze(-1)
        if any(ctx.needs_input_grad[1:3]):
            weights, *_ = ctx.saved_tensors  # raises if an input has changed since the forward pass
            if head is not None and _is_uniform(upstream_N):
                # Scaled in place and released, so that autograd takes it without a copy; a second backward recomputes.
                ctx.head_gradient = None
                factor = upstream_N[:1].sum()
                head = [None if gradient is None else gradient.mul_(factor) for gradient in head]
            else:
                weighted_N = upstream_N if weights is None else upstream_N * weights
                _, (_, *head) = ctx.fold.run(weighted_N, (False, *ctx.needs_input_grad[1:3]))
        return hidden_NH, *head, None, None  # float32: autograd casts each to the dtype of its parameter


@dataclass(frozen=True, slots=True)
class _Fold:
    """One pass over the tokens, with all of its inputs but the weights."""

    student: LazyLogits
    teacher: LazyLogits
    divergence: Divergence
    clip: float | None
    sampled: Sampled | None
    dtypes: tuple[torch.dtype, ...]
    chunk_tokens: int | None
    vocabulary: int | None
    references: Sequence[ReferenceModel]
    anchor: Divergence

    def run(
        self, weights_N: Tensor | None, wanted: tuple[bool, ...]
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """Statistics of each token, [N] each, and the gradients of student hidden, weight and bias, if `wanted`."""
        # Statistics are those of `eager_`, the first with `nll` and anchors added, then `ranked`, `top_shared`,
        # `top_mass`, the anchors' part, and `accepted`.
        # The gradients are those of the sum of the weighted divergences, in float32.
        student = Side.of(self.student, self.dtypes[0], self.vocabulary)
        is_known = isinstance(self.teacher.head, TokenHead)
        whole = None if is_known else Side.of(self.teacher, self.dtypes[1], self.vocabulary)
        of_references = zip(self.references, self.dtypes[2:], strict=True)
        others = [(one, Side.of(one.logits, dtype, self.vocabulary)) for one, dtype in of_references]
        (tokens, width), vocabulary = student.hidden_NH.shape, student.weight_VH.size(0)
        device, dtype = student.hidden_NH.device, student.weight_VH.dtype

        # In float32 the gradient overwrites the student's logits; lower-precision products need it in their own dtype.
        in_place = dtype == torch.float32 or not any(wanted)
        stride = -(-vocabulary // STRIDE_ELEMENTS) * STRIDE_ELEMENTS
        anchor = next((number for number, one in enumerate(self.references) if one.anchor), None)
        # What is only added to the target needs no tile.
        held = [bool(one.anchor) or whole is None or not is_sum(whole, others) for one in self.references]
        tiles = 2 + sum(held) + (anchor is not None)
        token_bytes = stride * (4 * tiles + (0 if in_place else _GROUP_TILES * dtype.itemsize))
        tile_tokens = max(1, min(tokens, self.chunk_tokens or tile_of(tokens, token_bytes, memory_of(device))))
        group_tokens = tile_tokens if in_place else min(tokens, tile_tokens * _GROUP_TILES)
        # Of the student, the teacher and others, and a copy of the student's, which the first comparison overwrites.
        products_TCV = torch.empty(tiles, tile_tokens, stride, device=device)[..., :vocabulary]
        products_2CV, (student_CV, teacher_CV, *free) = products_TCV[:2], products_TCV
        others_CV = [free.pop(0) if own else teacher_CV for own in held]
        teacher: Side | CompletedSide | None = whole
        if teacher is None:
            teacher = CompletedSide(KnownTokens.unpack(self.teacher.hidden.to(device)), student.finish, student_CV)
        gradient_GV = student_CV
        if not in_place:
            gradient_GV = torch.empty(group_tokens, stride, dtype=dtype, device=device)[:, :vocabulary]

        step = step_for(self.divergence, self.clip, device)
        step_rows = _block_rows(student_CV) if step is eager_ else tile_tokens
        finish = Finish(None, None) if any(one.push for one in self.references) else teacher.finish
        finishes, objective = (student.finish, finish), (self.divergence, self.clip)
        statistics_10N, top_3N = torch.empty(STATISTICS, tokens, device=device), torch.zeros(3, tokens, device=device)
        anchored_N = torch.zeros(tokens, device=device)
        # Ranked rows are collected over several tiles: tile by tile they would be many small kernels.
        ranked_tokens = max(1, min(tokens, tile_tokens * _GROUP_TILES))
        ranked_2KV = torch.empty(2, -(-ranked_tokens // EVERY), stride, device=device)[..., :vocabulary]
        top_3N[0, looked_at(tokens, slice(0, tokens))], ranked_from, kept = 1.0, 0, 0
        head_rows = self.student.head.weight.size(0)
        shapes = (tokens, width), (head_rows, width), (head_rows,)
        # The first group overwrites, so zeros are needed only if there is no group, or for head rows past `vocabulary`.
        new = torch.empty if tokens and head_rows == vocabulary else torch.zeros
        gradients = tuple(
            new(shape, device=device) if want else None for shape, want in zip(shapes, wanted, strict=True)
        )
        hidden_NH, *head = gradients
        shared = [None if gradient is None else gradient[:vocabulary] for gradient in head]
        for group in _spans(0, tokens, max(1, group_tokens)):
            for tile in _spans(group.start, group.stop, tile_tokens):
                student.project_(student_CV, tile)
                if others:
                    project_target_(teacher, others, [teacher_CV, *others_CV], tile, _block_rows(teacher_CV))
                else:
                    teacher.project_(teacher_CV, tile)
                if anchor is not None:
                    products_TCV[-1].copy_(student_CV)
                some_2KV = products_2CV[:, looked_at(tokens, tile)]
                ranked_2KV[:, kept : kept + some_2KV.size(1)] = some_2KV
                kept += some_2KV.size(1)
                # Logits are finished in a copy, as the step below finishes the tile itself.
                if tile.stop == min(ranked_from + ranked_tokens, tokens):
                    span = slice(ranked_from, tile.stop)
                    for finish, products_KV in zip(finishes, ranked_2KV[:, :kept], strict=True):
                        finish(products_KV)
                    top_3N[1:, span][:, looked_at(tokens, span)] = top_shared_(ranked_2KV[:, :kept])
                    ranked_from, kept = tile.stop, 0
                for rows in _spans(tile.start, tile.stop, step_rows):
                    here, weights_R = _shift(rows, -tile.start), None if weights_N is None else weights_N[rows]
                    products = student_CV[here], teacher_CV[here]
                    drawn = None if self.sampled is None else self.sampled.rows(rows)
                    gradient_RV = gradient_GV[_shift(rows, -group.start)] if any(wanted) else None
                    statistics_10N[:, rows] = step(*objective, finishes, *products, weights_R, drawn, gradient_RV)
                    if anchor is not None:
                        pair = (
                            (student.finish, products_TCV[-1][here]),
                            (others[anchor][1].finish, others_CV[anchor][here]),
                        )
                        anchored_N[rows] = self._anchored(pair, self.references[anchor].anchor, weights_R, gradient_RV)
            # Once per group: each product reads and writes the whole gradient of the head.
            student.backproject_(gradient_GV, group, hidden_NH, *shared)
        value_N, accepted_N = statistics_10N[0], None
        if self.clip is None and not any(one.push for one in self.references):
            accepted_N = self.divergence.accepted(value_N if weights_N is None else value_N / weights_N)
        value_N.add_(statistics_10N[_PULLED]).add_(anchored_N)
        if hidden_NH is not None:  # no divergence without a gradient: that of a user may be NaN where its value is not
            broken_N = ~hidden_NH.sum(-1).isfinite()
            value_N.masked_fill_(broken_N & value_N.isfinite(), torch.nan)
        return (*statistics_10N, *top_3N, anchored_N, accepted_N), gradients

    def _anchored(
        self,
        pair: tuple[tuple[Finish, Tensor], tuple[Finish, Tensor]],
        weight: float,
        weights_R: Tensor | None,
        gradient_RV: Tensor | None,
    ) -> Tensor:
        """The weighted divergence of the student from the anchor, [R]; adds its gradient where there is one."""
        (mine, mine_RV), (theirs, theirs_RV) = pair
        step, wanted = step_for(self.anchor, None, mine_RV.device), None if gradient_RV is None else mine_RV
        weights_R = mine_RV.new_full((len(mine_RV),), weight) if weights_R is None else weights_R * weight
        found_10R = step(self.anchor, None, (mine, theirs), mine_RV, theirs_RV, weights_R, None, wanted)
        if gradient_RV is not None:
            gradient_RV.add_(mine_RV)
        return found_10R[0]


def _is_uniform(upstream_N: Tensor) -> bool:
    """Whether all tokens have the same upstream gradient, as far as that is known without a device synchronisation."""
    if upstream_N.numel() <= 1 or upstream_N.stride(0) == 0:
        return True
    return upstream_N.device.type == "cpu" and bool((upstream_N == upstream_N[0]).all())


def _block_rows(tile_CV: Tensor) -> int:
    elements = _BLOCK_ELEMENTS.get(tile_CV.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    return max(1, elements // tile_CV.size(1))


def _spans(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _shift(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


@torch.no_grad()
def streamed_entropy(
    model: LazyLogits, chunk_tokens: int | None = None, vocabulary: int | None = None, ids: Tensor | None = None
) -> Tensor:
    """A model's entropy at each token, [N], nats, float32, without its logits in full and without a gradient.

    It is the `student_entropy` of [`~losses.streamed_divergence`] up to rounding, for one product with a head instead
    of two; `chunk_tokens` and `vocabulary` are those of that function. With `ids`, [N], it is `-log p` of these tokens.
    """
    if isinstance(model.head, TokenHead):
        known = KnownTokens.unpack(model.hidden)
        return known.entropy() if ids is None else -known.logprobs[:, 0]  # the token of the row is the first
    entropy_N = torch.empty(len(model.hidden), device=model.hidden.device)
    for rows, logits_RV in _blocks(model, chunk_tokens, vocabulary):
        if ids is None:
            entropy_N[rows] = _entropy_(logits_RV)
        else:
            entropy_N[rows] = logits_RV.logsumexp(-1) - logits_RV.gather(-1, ids[rows].unsqueeze(-1)).squeeze(-1)
    return entropy_N


@torch.no_grad()
def streamed_likeliest(
    model: LazyLogits, k: int, chunk_tokens: int | None = None, vocabulary: int | None = None
) -> Tensor:
    """A model's K likeliest tokens at each position, [N, K], int64, or all V; as [`streamed_entropy`]."""
    k = min(k, vocabulary or len(model.head.weight))
    rows_NK = [logits_RV.topk(k).indices for _, logits_RV in _blocks(model, chunk_tokens, vocabulary)]
    return torch.cat([torch.empty(0, k, dtype=torch.long, device=model.hidden.device), *rows_NK])


def streamed_known(
    model: LazyLogits, ids_N: Tensor, k: int, chunk_tokens: int | None = None, vocabulary: int | None = None
) -> KnownTokens:
    """What is kept of a model: of each position the token that follows, its K likeliest, and the mass of all others."""
    k = min(k, vocabulary or len(model.head.weight))
    parts = []
    for rows, logits_RV in _blocks(model, chunk_tokens, vocabulary):
        logs_RV, own_R1 = logits_RV.log_softmax(1), ids_N[rows, None]
        ids_RK = torch.cat([own_R1, logs_RV.topk(k).indices], dim=1)
        known_RK = logs_RV.gather(1, ids_RK)
        # Summed over the others themselves: 1 minus the sum would not resolve less than 1e-7.
        rest_R = logs_RV.scatter_(1, ids_RK, -torch.inf).logsumexp(1).clamp(min=LEAST)
        parts.append(KnownTokens(ids_RK, known_RK, rest_R))
    return KnownTokens(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _blocks(model: LazyLogits, chunk_tokens: int | None, vocabulary: int | None) -> Iterator[tuple[slice, Tensor]]:
    """The logits of some positions after the other, [R, V], which may be overwritten."""
    side = Side.of(model, product_dtype(model), vocabulary)
    tokens, width, device = len(side.hidden_NH), len(side.weight_VH), side.hidden_NH.device
    stride = -(-width // STRIDE_ELEMENTS) * STRIDE_ELEMENTS
    tile_tokens = max(1, min(tokens, chunk_tokens or tile_of(tokens, 4 * stride, memory_of(device))))
    tile_CV = torch.empty(tile_tokens, stride, device=device)[:, :width]
    for tile in _spans(0, tokens, tile_tokens):
        side.project_(tile_CV, tile)
        for rows in _spans(tile.start, tile.stop, _block_rows(tile_CV)):
            logits_RV = tile_CV[rows.start - tile.start : rows.stop - tile.start]
            side.finish(logits_RV)
            yield rows, logits_RV


def _entropy_(logits_RV: Tensor) -> Tensor:
    """[R]; overwrites the logits."""
    logits_RV.sub_(logits_RV.amax(-1, keepdim=True))
    probs_RV = logits_RV.exp()
    total_R = probs_RV.sum(-1)
    return total_R.log() - probs_RV.mul_(logits_RV).sum(-1) / total_R
