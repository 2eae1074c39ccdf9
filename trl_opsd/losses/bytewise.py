"""The divergence of two models' distributions over the next byte, whatever their tokens are.

`P(next byte | bytes so far)` is summed from states that a model has already. Of all token sequences, those count that
follow the model's own tokens up to a border at most three tokens back, and then take any one token that spells the
bytes since and the next one. With the vocabulary sorted by bytes, these tokens are a range, and a range is a difference
of one cumulative sum. What is missed leaves the tokens in between; where that is more than [`MOST_ESCAPE`] of a
distribution, the position is left out.

By the chain rule, the sum over bytes is the divergence of the two models as distributions over texts.

S states of a tile · V vocabulary size · T tokens with a meaning · N tokens in the loss · P byte positions · Q ranges
R reads: sums that a position adds, each of the ranges of a node
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.streamed import (
    _addmm_,
    _product_dtype,
    _Side,
    _spans,
    _Streamed,
    memory_of,
    tile_of,
)
from trl_opsd.types import LazyLogits, PerToken, Sampled
from trl_opsd.types.bytewise import BACK, OUTCOMES, ByteTable, Spelled

MOST_ESCAPE = 0.03
"""Largest share of sequences that end a token where the model's own goes on, and that the sums miss."""
_FLOOR = 1e-6
"""Added to each probability of an outcome: what no token spells is not impossible, but missed."""
_BYTES_PER_LOGIT = 32
"""Memory of a tile for each logit: float32 logits, probabilities and gradients, and float64 sums of both."""


class _Ranges(torch.autograd.Function):
    """The probability of ranges of the sorted vocabulary, [Q], float64; the gradient of a range is one more range."""

    @staticmethod
    def forward(ctx: Any, logits_SV: Tensor, order_T: Tensor, state_Q: Tensor, ends_Q2: Tensor) -> Tensor:
        probs_ST = logits_SV[:, order_T].softmax(-1, dtype=torch.float32)
        # In float64, as the small ranges at the end of the vocabulary are differences of sums near 1.
        sums_ST = torch.zeros(len(probs_ST), len(order_T) + 1, dtype=torch.float64, device=probs_ST.device)
        torch.cumsum(probs_ST, -1, dtype=torch.float64, out=sums_ST[:, 1:])
        ctx.save_for_backward(probs_ST, order_T, state_Q, ends_Q2)
        ctx.vocabulary = logits_SV.size(1)
        return sums_ST[state_Q, ends_Q2[:, 1]] - sums_ST[state_Q, ends_Q2[:, 0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_Q: Tensor) -> tuple[Tensor | None, ...]:
        probs_ST, order_T, state_Q, ends_Q2 = ctx.saved_tensors
        steps_ST = upstream_Q.new_zeros(len(probs_ST), len(order_T) + 1)
        steps_ST.index_put_((state_Q, ends_Q2[:, 0]), upstream_Q, accumulate=True)
        steps_ST.index_put_((state_Q, ends_Q2[:, 1]), -upstream_Q, accumulate=True)
        slopes_ST = steps_ST.cumsum_(-1)[:, :-1]
        mean_S1 = (slopes_ST * probs_ST).sum(-1, keepdim=True)
        gradient_SV = probs_ST.new_zeros(len(probs_ST), ctx.vocabulary)
        gradient_SV[:, order_T] = (slopes_ST.sub_(mean_S1) * probs_ST).float()
        return gradient_SV, None, None, None


@dataclass(frozen=True, slots=True)
class _Masses:
    """What a tile's logits say of its byte positions."""

    logarithms: Tensor
    """[P, 257], float64: logarithms of the outcomes' probabilities."""
    escape: Tensor
    """[P], no gradient: share of what is missed at least."""


def _masses(logits_SV: Tensor, table: ByteTable, ids_S: Tensor, reads_R4: Tensor, positions: int) -> _Masses:
    """`reads_R4` in host memory, with positions and states of this tile."""
    host, device = table.to(torch.device("cpu")), logits_SV.device
    position_R, state_R, back_R, node_R = reads_R4.long().unbind(1)
    edges_R = host.first[node_R + 1] - host.first[node_R]
    read_Q = torch.arange(len(reads_R4)).repeat_interleave(edges_R)
    edge_Q = torch.arange(len(read_Q)) + (host.first[node_R] - edges_R.cumsum(0) + edges_R).repeat_interleave(edges_R)
    last_P = (back_R == 0).nonzero().squeeze(1)  # reads at the border before each position's own token
    indices = (read_Q, edge_Q, position_R, state_R, back_R, node_R, last_P)
    read_Q, edge_Q, position_R, state_R, back_R, node_R, last_P = (one.to(device) for one in indices)
    states, rank_S = torch.arange(len(ids_S), device=device), table.rank[ids_S]
    ends_Q2 = torch.cat(
        [
            torch.stack([table.low[edge_Q], table.high[edge_Q]], 1),
            table.whole[node_R[last_P]],
            torch.stack([rank_S, rank_S + 1], 1),
        ]
    )
    state_Q = torch.cat([state_R[read_Q], state_R[last_P], states])
    found_Q = _Ranges.apply(logits_SV, table.order, state_Q, ends_Q2)
    each_Q, whole_P, own_S = found_Q.split([len(edge_Q), len(last_P), len(states)])
    own_S = own_S.clamp(min=1e-30).log()
    # Of the sequences up to a border further back, those that follow the model's tokens are a share of its probability.
    path_S = own_S.cumsum(0) - own_S
    gain_R = (path_S[state_R] - path_S[state_R + back_R]).clamp(max=300.0).exp()
    flat_Q = position_R[read_Q] * OUTCOMES + table.outcome[edge_Q]
    mass_PO = each_Q.new_zeros(positions * OUTCOMES).index_add(0, flat_Q, each_Q * gain_R[read_Q])
    mass_PO = mass_PO.view(positions, OUTCOMES)
    with torch.no_grad():
        own_P = each_Q.new_zeros(len(state_R)).index_add(0, read_Q, each_Q)[last_P]
        escape_P = whole_P / (whole_P + own_P).clamp(min=1e-300)
    share_PO = mass_PO / mass_PO.sum(-1, keepdim=True).clamp(min=1e-300)
    return _Masses((share_PO + _FLOOR).log(), escape_P)


def _tile_tokens(lazy: LazyLogits, table: ByteTable, chunk_tokens: int | None) -> int:
    tokens = len(lazy.hidden)
    most = tile_of(max(tokens, 1), _BYTES_PER_LOGIT * len(table.order), memory_of(lazy.hidden.device))
    return max(1, min(tokens, chunk_tokens or most))


def _tiles(tokens: int, size: int, token_P: Tensor, reads_R4: Tensor) -> Any:
    """Tiles of tokens: the states that they read, their byte positions, and their reads by index within the tile."""
    position_R = reads_R4[:, 0].contiguous().long()
    for tile in _spans(0, tokens, size):
        states = slice(max(0, tile.start - BACK), tile.stop)
        here = slice(*torch.searchsorted(token_P, torch.tensor([tile.start, tile.stop])).tolist())
        reads = slice(*torch.searchsorted(position_R, torch.tensor([here.start, here.stop])).tolist())
        yield tile, states, here, reads_R4[reads].long() - torch.tensor([here.start, states.start, 0, 0])


@torch.no_grad()
def byte_logarithms(
    model: LazyLogits, table: ByteTable, ids: Tensor, token: Tensor, reads: Tensor, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """A model's distributions over the next byte, for one product with its head, and without logits in full.

    Args:
        model ([`LazyLogits`]):
            Hidden states [N, H] that predict the consecutive tokens of one text, and the head.
        table ([`~types.bytewise.ByteTable`]):
            Its vocabulary.
        ids (`torch.Tensor`):
            [N], these tokens.
        token (`torch.Tensor`):
            [P], in host memory: the number of each byte position's token.
        reads (`torch.Tensor`):
            [R, 4], in host memory, as [`~data.byte_vocabulary.ByteVocabulary.reads`] returns them.
        chunk_tokens (`int`, *optional*):
            Tokens whose logits exist at a time.

    Returns:
        `tuple`: [P, 257], float32, logarithms of probabilities; and [P], the share that is missed at least.
    """
    side = _Side.of(model, _product_dtype(model), None)
    device = side.hidden_NH.device
    table, found = table.to(device), []
    for _, states, here, reads_R4 in _tiles(len(ids), _tile_tokens(model, table, chunk_tokens), token, reads):
        logits_SV = torch.empty(states.stop - states.start, len(side.weight_VH), device=device)
        side.project_(logits_SV, states)
        side.finish(logits_SV)
        found.append(_masses(logits_SV, table, ids[states].to(device), reads_R4, here.stop - here.start))
    if not found:
        return torch.empty(0, OUTCOMES, device=device), torch.empty(0, device=device)
    return torch.cat([one.logarithms for one in found]).float(), torch.cat([one.escape for one in found])


def bytewise_divergence(
    student: LazyLogits,
    teacher: LazyLogits,
    divergence: Divergence,
    table: ByteTable,
    spelled: Spelled,
    sampled: Sampled,
    weights: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> PerToken:
    """The divergence of each token, summed over its bytes, in nats, for three products with the student's head.

    Args:
        student ([`LazyLogits`]):
            Hidden states [N, H] and head [V, H]. Rows follow each other.
        teacher ([`LazyLogits`]):
            Logarithms of the teacher's distributions [P, 257], with [`~types.bytewise.byte_head`].
        divergence ([`Divergence`]):
            Compares the 257 outcomes of each position.
        table ([`~types.bytewise.ByteTable`]):
            The student's vocabulary.
        spelled ([`~types.bytewise.Spelled`]):
            The byte positions of the tokens.
        sampled ([`~types.Sampled`]):
            The N tokens, and how much the student is pulled towards them.
        weights (`torch.Tensor`, *optional*):
            [N], constants; the weight of a byte is that of its token.
        chunk_tokens (`int`, *optional*):
            Tokens whose logits exist at a time.

    Returns:
        [`PerToken`]: the gradient is valid for the sum over tokens, however scaled.
    """
    fold = _Fold(student, teacher, divergence, table.to(student.head.weight.device), spelled, sampled, chunk_tokens)
    inputs = (student.hidden, student.head.weight, student.head.bias)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        values = _Streamed.apply(*inputs, weights, fold)
    else:
        values, _ = fold.run(weights, (False, False, False))
    value_N, student_entropy_N, teacher_entropy_N, pulled_N, outcomes_N, compared_N, escaped_N, lost_N = values
    return PerToken(
        divergence=value_N,
        student_entropy=student_entropy_N,
        teacher_entropy=teacher_entropy_N,
        pulled=None if sampled.pull is None else pulled_N,
        outcomes=outcomes_N,
        compared=compared_N,
        escaped=escaped_N,
        lost=lost_N,
    )


@dataclass(frozen=True, slots=True)
class _Fold:
    """One pass over the tokens, with all of its inputs but the weights."""

    student: LazyLogits
    teacher: LazyLogits
    divergence: Divergence
    table: ByteTable
    spelled: Spelled
    sampled: Sampled
    chunk_tokens: int | None

    def run(
        self, weights_N: Tensor | None, wanted: tuple[bool, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Statistics of each token, [N] each, and the gradients of student hidden, weight and bias, if `wanted`."""
        side = _Side.of(self.student, _product_dtype(self.student), None)
        (tokens, width), vocabulary, device = side.hidden_NH.shape, len(side.weight_VH), side.hidden_NH.device
        shapes = ((tokens, width), (vocabulary, width), (vocabulary,))
        gradients = [
            torch.zeros(one, device=device) if want else None for one, want in zip(shapes, wanted, strict=True)
        ]
        found_8N = torch.zeros(8, tokens, device=device)
        weights_N = torch.ones(tokens, device=device) if weights_N is None else weights_N
        size = _tile_tokens(self.student, self.table, self.chunk_tokens)
        for tile, states, here, reads_R4 in _tiles(tokens, size, self.spelled.token, self.spelled.reads):
            logits_SV = torch.empty(states.stop - states.start, vocabulary, device=device)
            side.project_(logits_SV, states)
            side.finish(logits_SV)
            with torch.enable_grad():
                leaf_SV = logits_SV.requires_grad_(any(wanted))
                value, found_8N[:, tile] = self._compared(leaf_SV, weights_N, tile, states, here, reads_R4)
            if any(wanted):
                (gradient_SV,) = torch.autograd.grad(value, leaf_SV)
                if (slope_SV := side.finish.slope(logits_SV.detach())) is not None:
                    gradient_SV.mul_(slope_SV)
                self._add(side, gradient_SV, states, gradients)
        return tuple(found_8N), tuple(gradients)

    def _compared(
        self, logits_SV: Tensor, weights_N: Tensor, tile: slice, states: slice, here: slice, reads_R4: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss of the tokens of a tile, and their statistics, [8, tokens]."""
        device, mine = logits_SV.device, slice(tile.start - states.start, None)
        ids_S = self.sampled.ids[states]
        masses = _masses(logits_SV, self.table, ids_S, reads_R4, here.stop - here.start)
        token_P = (self.spelled.token[here] - tile.start).to(device, non_blocking=True)
        held_P = self.spelled.held[here].to(device, non_blocking=True)
        held_P = held_P & (masses.escape <= MOST_ESCAPE)
        logs = masses.logarithms, self.teacher.hidden[here].to(device).double()
        log_student_PO, log_teacher_PO = (one.log_softmax(-1) for one in logs)
        # Of 257 outcomes all can be formed: in float64, without a product that half precision would round.
        value_P = self.divergence.value(log_student_PO, log_teacher_PO).where(held_P, 0.0) * weights_N[tile][token_P]

        def by_token(values_P: Tensor) -> Tensor:
            return torch.zeros(tile.stop - tile.start, device=device).index_add(0, token_P, values_P.float())

        value = value_P.sum()
        pulled_N = torch.zeros(tile.stop - tile.start, device=device)
        if self.sampled.pull is not None:
            logits_NV, ids_N1 = logits_SV[mine], ids_S[mine, None]
            own_N = logits_NV.gather(1, ids_N1).squeeze(1) - logits_NV[:, self.table.order].logsumexp(-1)
            pulled_N = -own_N * self.sampled.pull[tile] * weights_N[tile]
            value = value + pulled_N.sum()
        counts_N = weights_N[tile] != 0  # others are read for those that count
        outcomes_N = self.table.length[ids_S[mine]].float() * counts_N
        present_N = by_token(torch.ones_like(token_P))
        found = (
            by_token(value_P.detach()) + pulled_N.detach(),
            *(
                by_token(-(one.detach().exp() * one.detach()).sum(-1) * held_P)
                for one in (log_student_PO, log_teacher_PO)
            ),
            pulled_N.detach(),
            outcomes_N,
            by_token(held_P),
            by_token(~held_P),
            outcomes_N - present_N,
        )
        return value, torch.stack(found)

    def _add(self, side: _Side, gradient_SV: Tensor, states: slice, gradients: list[Tensor | None]) -> None:
        """Adds what the gradient of some logits is for hidden states, weight and bias, where wanted."""
        hidden_NH, weight_VH, bias_V = gradients
        slope = side.gain * (1.0 if side.finish.cap is None else side.finish.cap)
        given_SV = gradient_SV.to(side.weight_VH.dtype)
        if hidden_NH is not None:
            _addmm_(hidden_NH[states], given_SV, side.weight_VH, alpha=slope, beta=1)
        if weight_VH is not None:
            _addmm_(weight_VH, given_SV.T, side.hidden_NH[states], alpha=slope, beta=1)
        if bias_V is not None:
            bias_V.add_(gradient_SV.sum(0), alpha=slope)
