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

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_opsd.losses.byte_ranges import ByteTile, Plan, Tile
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.sampled import against_sampler
from trl_opsd.losses.side import Side, addmm_
from trl_opsd.losses.streamed import _GROUP_TILES, _Streamed
from trl_opsd.types import LazyLogits, PerToken, Sampled
from trl_opsd.types.bytewise import OUTCOMES, ByteTable, Spelled

MOST_ESCAPE = 0.03
"""Largest share of sequences that end a token where the model's own goes on, and that the sums miss."""
_COLUMNS = 64
"""Columns of the head's gradient that are put back in the order of ids at a time."""


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
    plan = Plan.of(model, chunk_tokens, table, ids, token, reads)
    logs_PO = torch.empty(len(token), OUTCOMES, device=plan.own_N.device)
    escape_P = torch.empty(len(token), dtype=torch.float64, device=plan.own_N.device)
    for tile in plan.tiles:
        logs_PO[tile.positions], escape_P[tile.positions] = ByteTile(plan, tile).logarithms()
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
    value_N, student_entropy_N, teacher_entropy_N, pulled_N, outcomes_N, compared_N, escaped_N, lost_N, own_N = values
    logprobs_N = (
        sampled.logprobs
        if weights is None or sampled.logprobs is None
        else sampled.logprobs.where(weights != 0, torch.nan)
    )
    kl_N, known_N = (None, None) if logprobs_N is None else against_sampler(own_N, logprobs_N)
    return PerToken(
        divergence=value_N,
        student_entropy=student_entropy_N,
        teacher_entropy=teacher_entropy_N,
        pulled=None if sampled.pull is None else pulled_N,
        sampler_kl=kl_N,
        sampler_known=known_N,
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
        given = self.spelled.token, self.spelled.reads, self.spelled.held
        plan = Plan.of(self.student, self.chunk_tokens, self.table, self.sampled.ids, *given)
        memory_SV, device, dtype = plan.memory_SV, plan.own_N.device, plan.side.weight_VH.dtype
        (tokens, width), rows = plan.side.hidden_NH.shape, len(self.student.head.weight)
        shapes = ((tokens, width), (rows, width), (rows,))
        gradients = [
            torch.zeros(one, device=device) if want else None for one, want in zip(shapes, wanted, strict=True)
        ]
        found_9N = torch.zeros(9, tokens, device=device)
        weights_N = torch.ones(tokens, device=device) if weights_N is None else weights_N
        # As of other losses: products in lower precision take the gradients of several tiles at once.
        in_place = dtype == torch.float32 or not any(wanted)
        size = 1 if in_place else _GROUP_TILES
        group_SV = memory_SV if in_place else memory_SV.new_empty(size * len(memory_SV), memory_SV.size(1), dtype=dtype)
        for tiles in (plan.tiles[at : at + size] for at in range(0, len(plan.tiles), size)):
            group = slice(tiles[0].states.start, tiles[-1].states.stop)
            for tile in tiles:
                part = ByteTile(plan, tile)
                leaves = part.found_Q, part.own_S
                with torch.enable_grad():
                    for leaf in leaves:
                        leaf.requires_grad_(any(wanted))
                    value, found_9N[:, tile.tokens] = self._compared(plan, tile, part, weights_N)
                if not any(wanted):
                    continue
                gradient_SV = part.gradient_(*torch.autograd.grad(value, leaves, materialize_grads=True))
                if not in_place:
                    # The tile before has begun with the states that both read.
                    begun = tile.tokens.start - tile.states.start if tile is not tiles[0] else 0
                    given_SV = group_SV[tile.states.start - group.start : tile.states.stop - group.start]
                    given_SV[:begun].add_(gradient_SV[:begun])
                    given_SV[begun:].copy_(gradient_SV[begun:])
            if any(wanted):
                self._add(plan.side, group_SV[: group.stop - group.start, : len(self.table.order)], group, gradients)
        _by_id(gradients[1:], plan.table)
        return tuple(found_9N), tuple(gradients)

    def _compared(self, plan: Plan, tile: Tile, part: ByteTile, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted loss of the tokens of a tile, and their statistics, [9, tokens]."""
        here, tokens, (held_P,) = tile.positions, tile.tokens.stop - tile.tokens.start, plan.more
        device, weights_N, (logarithms_PO, escape_P) = part.own_S.device, weights_N[tile.tokens], part.logarithms()
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
            pulled_N = -part.own_S[-tokens:] * self.sampled.pull[tile.tokens] * weights_N
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
            part.own_S[-tokens:].detach(),
        )
        return value, torch.stack([one.float() for one in found])

    def _add(self, side: Side, given_ST: Tensor, states: slice, gradients: list[Tensor | None]) -> None:
        """Adds what the gradient of some logits is for hidden states, and the first rows of weight and bias."""
        hidden_NH, weight_VH, bias_V = gradients
        slope = side.gain * (1.0 if side.finish.cap is None else side.finish.cap)
        if hidden_NH is not None:
            addmm_(hidden_NH[states], given_ST, side.weight_VH, alpha=slope, beta=1)
        if weight_VH is not None:
            addmm_(weight_VH[: given_ST.size(1)], given_ST.T, side.hidden_NH[states], alpha=slope, beta=1)
        if bias_V is not None:
            bias_V[: given_ST.size(1)].add_(given_ST.sum(0, dtype=torch.float32), alpha=slope)


def _by_id(gradients: list[Tensor | None], table: ByteTable) -> None:
    """Moves the rows of sorted tokens, the first ones, to their ids; rows of no token, as those after them, are 0."""
    for gradient in (one for one in gradients if one is not None):
        row_V = torch.full((len(gradient),), len(table.order), dtype=torch.int32, device=gradient.device)
        row_V[table.order] = torch.arange(len(table.order), dtype=torch.int32, device=gradient.device)
        # A few columns at a time, as a second gradient of the head may not fit.
        for some in gradient.view(len(gradient), -1).split(_COLUMNS, 1):
            some.copy_(some.index_select(0, row_V))
