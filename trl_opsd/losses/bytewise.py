"""The divergence of two models' distributions over the next byte, whatever their tokens are.

`P(next byte | bytes so far)` is summed from states that a model has already. Of all token sequences, those count that
follow the model's own tokens up to a border at most three tokens back, and then take any one token that spells the
bytes since and the next one. With the vocabulary sorted by bytes, these tokens are a range. What is missed leaves the
tokens in between; where that is more than [`MOST_ESCAPE`] of a distribution, the position is left out.

By the chain rule, the sum over bytes is the divergence of the two models as distributions over texts.

The rows of the head are sorted once per call, so that the logits of each tile are; the gradient of the head is put back
in the order of ids at the end.

S states of a tile · V vocabulary size · T tokens with a meaning · N tokens in the loss · P byte positions · H width
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trl_opsd.losses.byte_ranges import Plan, Positions, SortedTile, Tile
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.streamed import _GROUP_TILES, _addmm_, _product_dtype, _Side, _Streamed
from trl_opsd.types import LazyLogits, PerToken, Sampled
from trl_opsd.types.bytewise import OUTCOMES, ByteTable, Spelled

MOST_ESCAPE = 0.03
"""Largest share of sequences that end a token where the model's own goes on, and that the sums miss."""
_COLUMNS = 256
"""Columns of the head's gradient that are put back in the order of ids at a time."""


def _sorted_side(model: LazyLogits, table: ByteTable) -> _Side:
    """A model whose logits are those of the sorted tokens."""
    side = _Side.of(model, _product_dtype(model), None)
    bias = side.finish.bias
    finish = replace(side.finish, bias=None if bias is None else bias.index_select(0, table.order))
    return replace(side, weight_VH=side.weight_VH.index_select(0, table.order), finish=finish)


def _tile_logits(side: _Side, states: slice, tile_SV: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of some states, in memory of a tile: of the sorted tokens alone, and with all columns."""
    all_SV = tile_SV[: states.stop - states.start]
    logits_ST = all_SV[:, : len(side.weight_VH)]
    side.project_(logits_ST, states)
    side.finish(logits_ST)
    return logits_ST, all_SV


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
            [N], these tokens, in host memory.
        token (`torch.Tensor`):
            [P], in host memory: the number of each byte position's token.
        reads (`torch.Tensor`):
            [R, 4], in host memory, as [`~data.byte_vocabulary.ByteVocabulary.reads`] returns them.
        chunk_tokens (`int`, *optional*):
            Tokens whose logits exist at a time.

    Returns:
        `tuple`: [P, 257], float32, logarithms of probabilities; and [P], the share that is missed at least.
    """
    plan = Plan.of(model, chunk_tokens, table, token, reads, ids)
    side, own_N = _sorted_side(model, plan.table), plan.table.rank[plan.more[0]]
    logs_PO = torch.empty(len(token), OUTCOMES, device=own_N.device)
    escape_P = torch.empty(len(token), dtype=torch.float64, device=own_N.device)
    tile_SV = plan.memory()
    for tile in plan.tiles:
        _, logits_SV = _tile_logits(side, tile.states, tile_SV)
        states, positions = SortedTile(logits_SV, len(table.order), own_N[tile.states]), Positions(plan, tile)
        found = positions.logarithms(states.probabilities(*positions.ranges), states.own_S)
        logs_PO[tile.positions], escape_P[tile.positions] = found
    return logs_PO, escape_P


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
    fold = _Fold(student, teacher, divergence, table, spelled, sampled, chunk_tokens)
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
        spelled = self.spelled
        plan = Plan.of(self.student, self.chunk_tokens, self.table, spelled.token, spelled.reads, spelled.held)
        side, device = _sorted_side(self.student, plan.table), plan.token_P.device
        (tokens, width), rows, known = side.hidden_NH.shape, len(self.student.head.weight), len(side.weight_VH)
        shapes = ((tokens, width), (rows, width), (rows,))
        gradients = [
            torch.zeros(one, device=device) if want else None for one, want in zip(shapes, wanted, strict=True)
        ]
        of_known = [gradients[0], *(None if one is None else one[:known] for one in gradients[1:])]
        found_8N = torch.zeros(8, tokens, device=device)
        weights_N = torch.ones(tokens, device=device) if weights_N is None else weights_N
        own_N, dtype, tile_SV = plan.table.rank[self.sampled.ids], side.weight_VH.dtype, plan.memory()
        # As of other losses: products in lower precision take the gradients of several tiles at once.
        in_place = dtype == torch.float32 or not any(wanted)
        size = 1 if in_place else _GROUP_TILES
        group_SV = tile_SV if in_place else tile_SV.new_empty(size * len(tile_SV), tile_SV.size(1), dtype=dtype)
        for tiles in (plan.tiles[at : at + size] for at in range(0, len(plan.tiles), size)):
            group = slice(tiles[0].states.start, tiles[-1].states.stop)
            for tile in tiles:
                logits_ST, logits_SV = _tile_logits(side, tile.states, tile_SV)
                slope_ST = side.finish.slope(logits_ST) if any(wanted) else None
                states, positions = SortedTile(logits_SV, known, own_N[tile.states]), Positions(plan, tile)
                leaves = states.probabilities(*positions.ranges), states.own_S
                with torch.enable_grad():
                    for leaf in leaves:
                        leaf.requires_grad_(any(wanted))
                    logarithms = positions.logarithms(*leaves)
                    value, found_8N[:, tile.tokens] = self._compared(plan, tile, logarithms, states.own_S, weights_N)
                if not any(wanted):
                    continue
                gradient_SV = states.gradient_(*torch.autograd.grad(value, leaves, materialize_grads=True))
                if slope_ST is not None:
                    gradient_SV[:, :known].mul_(slope_ST)
                if not in_place:
                    # The tile before has begun with the states that both read.
                    begun = tile.tokens.start - tile.states.start if tile is not tiles[0] else 0
                    given_SV = group_SV[tile.states.start - group.start : tile.states.stop - group.start]
                    given_SV[:begun].add_(gradient_SV[:begun])
                    given_SV[begun:].copy_(gradient_SV[begun:])
            if any(wanted):
                self._add(side, group_SV[: group.stop - group.start, :known], group, of_known)
        _by_id(gradients[1:], plan.table)
        return tuple(found_8N), tuple(gradients)

    def _compared(
        self, plan: Plan, tile: Tile, by_byte: tuple[Tensor, Tensor], own_S: Tensor, weights_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The weighted loss of the tokens of a tile, and their statistics, [8, tokens]."""
        device, here, tokens = own_S.device, tile.positions, tile.tokens.stop - tile.tokens.start
        weights_N, (logarithms_PO, escape_P), (held_P,) = weights_N[tile.tokens], by_byte, plan.more
        token_P = plan.token_P[here] - tile.tokens.start
        held_P = held_P[here].bool() & (escape_P <= MOST_ESCAPE)
        logs = logarithms_PO, self.teacher.hidden[here].to(device).double()
        log_student_PO, log_teacher_PO = (one.log_softmax(-1) for one in logs)
        # Of 257 outcomes all can be formed: in float64, without a product that half precision would round.
        value_P = self.divergence.value(log_student_PO, log_teacher_PO).where(held_P, 0.0) * weights_N[token_P]

        def by_token(values_P: Tensor) -> Tensor:
            return torch.zeros(tokens, device=device).index_add(0, token_P, values_P.float())

        value = value_P.sum()
        pulled_N = torch.zeros(tokens, device=device)
        if self.sampled.pull is not None:
            pulled_N = -own_S[-tokens:] * self.sampled.pull[tile.tokens] * weights_N
            value = value + pulled_N.sum()
        counts_N = weights_N != 0  # others are read for those that count
        outcomes_N = plan.table.length[self.sampled.ids[tile.tokens]].float() * counts_N
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
        return value, torch.stack([one.float() for one in found])

    def _add(self, side: _Side, given_ST: Tensor, states: slice, gradients: list[Tensor | None]) -> None:
        """Adds what the gradient of some logits is for hidden states, weight and bias, where wanted."""
        hidden_NH, weight_TH, bias_T = gradients
        slope = side.gain * (1.0 if side.finish.cap is None else side.finish.cap)
        if hidden_NH is not None:
            _addmm_(hidden_NH[states], given_ST, side.weight_VH, alpha=slope, beta=1)
        if weight_TH is not None:
            _addmm_(weight_TH, given_ST.T, side.hidden_NH[states], alpha=slope, beta=1)
        if bias_T is not None:
            bias_T.add_(given_ST.sum(0, dtype=torch.float32), alpha=slope)


def _by_id(gradients: list[Tensor | None], table: ByteTable) -> None:
    """Moves the rows of sorted tokens, the first ones, to their ids; rows of no token, as those after them, are 0."""
    for gradient in (one for one in gradients if one is not None):
        row_V = torch.full((len(gradient),), len(table.order), dtype=torch.int32, device=gradient.device)
        row_V[table.order] = torch.arange(len(table.order), dtype=torch.int32, device=gradient.device)
        # A few columns at a time, as a second gradient of the head may not fit.
        for some in gradient.view(len(gradient), -1).split(_COLUMNS, 1):
            some.copy_(some.index_select(0, row_V))
