"""The distribution of each next byte, as sums of ranges of the sorted vocabulary, and their gradient; tile by tile.

A range is whole blocks of columns, a difference of one cumulative sum of blocks, and a piece of a block at each end,
which is added up by itself. No small probability within a block is a difference of large ones.

S states of a tile · T tokens with a meaning · V columns of a tile, a multiple of blocks · K blocks of B columns
P byte positions · R reads: sums that a position adds, each of the ranges of a node · Q ranges
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trl_opsd.losses.side import STRIDE_ELEMENTS, Side, product_dtype
from trl_opsd.losses.streamed import _GROUP_TILES, memory_of, tile_of
from trl_opsd.types import LazyLogits
from trl_opsd.types.bytewise import BACK, OUTCOMES, ByteTable
from trl_opsd.types.targets import has_streams

_FLOOR = 1e-6
"""Added to each probability of an outcome: what no token spells is not impossible, but missed."""
_LEAST = -69.0
"""Lower bound, in nats, on the log-probability of a token between two borders."""
_BLOCK = 32
"""Columns of a block: the pieces of a token's 309 ranges are then an eighth of its logits, with 152,000 ids."""
_RANGE_BYTES, _POSITION_BYTES = 500, 36_000
"""Memory of a tile for each range, its pieces and indices, and for each byte position, float64 distributions."""


class Tile(NamedTuple):
    """Consecutive tokens, the states that they read, their byte positions, their reads, and the number of ranges."""

    tokens: slice
    states: slice
    positions: slice
    reads: slice
    ranges: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of N tokens, their indices, copied to the device at once, and the head of the sorted tokens."""

    tiles: list[Tile]
    table: ByteTable
    side: Side
    own_N: Tensor
    """Places of the tokens among the sorted ones."""
    memory_SV: Tensor
    """For the logits of any tile."""
    token_P: Tensor
    """The token of each byte position, ascending; int32, as all that was copied."""
    reads_4R: Tensor
    more: list[Tensor]

    @classmethod
    def of(cls, model: LazyLogits, chunk_tokens: int | None, table: ByteTable, ids: Tensor, *given: Tensor) -> Plan:
        """`given` are the token of each position, its reads [R, 4], and what else is copied, in host memory."""
        tokens, device, host = len(model.hidden), model.head.weight.device, table.to(torch.device("cpu"))
        side, (token, reads, *_) = Side.of(model, product_dtype(model), None), given
        columns = -(-len(table.order) // STRIDE_ELEMENTS) * STRIDE_ELEMENTS
        node_R, position_R = reads[:, 3], reads[:, 0].contiguous()
        ranges_R = (host.first[node_R + 1] - host.first[node_R]).cumsum(0)
        group = 0 if (dtype := side.weight_VH.dtype) == torch.float32 else _GROUP_TILES * dtype.itemsize
        token_bytes = columns * (4 + 4 * (side.finish.cap is not None) + group)
        token_bytes += (_RANGE_BYTES * int(ranges_R[-1:].sum()) + _POSITION_BYTES * len(token)) // max(1, tokens)
        size = max(1, min(tokens, chunk_tokens or tile_of(max(1, tokens), token_bytes, memory_of(device))))
        token_C = torch.tensor([*range(0, tokens, size), tokens])
        position_C = torch.searchsorted(token, token_C)
        read_C = torch.searchsorted(position_R, position_C)
        range_C = torch.cat([ranges_R.new_zeros(1), ranges_R])[read_C]
        bounds = pairwise(zip(*(one.tolist() for one in (token_C, position_C, read_C, range_C)), strict=True))
        tiles = [
            Tile(slice(at, to), slice(max(0, at - BACK), to), slice(*positions), slice(*reads), last - first)
            for (at, *a, first), (to, *b, last) in bounds
            for positions, reads in [zip(a, b, strict=True)]
        ]
        sent = [token, reads.T, *given[2:]]
        sizes, table = [one.numel() for one in sent], table.to(device)
        block = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=has_streams(device))
        block = torch.cat([one.int().flatten() for one in sent], out=block).to(device, non_blocking=True)
        token_P, reads_4R, *more = (a.view(b.shape) for a, b in zip(block.split(sizes), sent, strict=True))
        bias = side.finish.bias
        finish = replace(side.finish, bias=None if bias is None else bias.index_select(0, table.order))
        side = replace(side, weight_VH=side.weight_VH.index_select(0, table.order), finish=finish)
        memory_SV = torch.empty(min(tokens, size + BACK), columns, device=device)
        return cls(tiles, table, side, table.rank[ids.to(device)], memory_SV, token_P, reads_4R, more)


class ByteTile:
    """The probabilities of a tile's states, in place of their logits, and the ranges that its byte positions sum."""

    def __init__(self, plan: Plan, tile: Tile) -> None:
        self._weigh(plan, tile)
        self.found_Q = self._probabilities(*self._ranges(plan, tile))
        """[Q], float64: probabilities of the ranges of reads, and then of one range for each position."""

    def _weigh(self, plan: Plan, tile: Tile) -> None:
        self._each_SV = logits_SV = plan.memory_SV[: tile.states.stop - tile.states.start]
        (states, width), own_S = logits_SV.shape, plan.own_N[tile.states]
        logits_ST = logits_SV[:, : len(plan.table.order)]
        plan.side.project_(logits_ST, tile.states)
        plan.side.finish(logits_ST)
        self._slope_ST = plan.side.finish.slope(logits_ST)
        logits_SV[:, logits_ST.size(1) :] = -torch.inf
        self._own_S = torch.arange(states, device=own_S.device, dtype=torch.int32) * width + own_S
        highest_S1 = logits_SV.amax(-1, keepdim=True)
        own_S = logits_SV.view(-1).index_select(0, self._own_S) - highest_S1.squeeze(1)
        logits_SV.sub_(highest_S1).exp_()
        self._blocks = width // _BLOCK
        # In float64, as blocks at the end of the vocabulary are differences of sums near the whole.
        self._upto_SK = torch.zeros(states, self._blocks + 1, dtype=torch.float64, device=own_S.device)
        sums_SK = logits_SV.view(states, -1, _BLOCK).sum(-1)
        torch.cumsum(sums_SK, -1, dtype=torch.float64, out=self._upto_SK[:, 1:])
        self._total_S = self._upto_SK[:, -1].contiguous()
        self.own_S = own_S - self._total_S.log()
        """[S], float64: logarithms of the probabilities of the model's own tokens."""

    def _ranges(self, plan: Plan, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """State, first column and the one after the last of each range.

        Those of reads, then one for each position: the tokens that are just the bytes of its own token so far.
        """
        table, device = plan.table, plan.reads_4R.device
        position_R, state_R, self._back_R, node_R = plan.reads_4R[:, tile.reads]
        self._state_R, position_R = state_R - tile.states.start, position_R - tile.positions.start
        first_R = table.first[node_R]
        stop_R = (table.first[node_R + 1] - first_R).cumsum(0)
        range_Q = torch.arange(tile.ranges, device=device)
        self._read_Q = torch.searchsorted(stop_R, range_Q, right=True)
        edge_Q = table.first[node_R + 1][self._read_Q] - stop_R[self._read_Q] + range_Q
        # The read at the border before a position's own token is its last.
        number_P = torch.arange(tile.positions.stop - tile.positions.start, device=device, dtype=torch.int32)
        self._last_P = torch.searchsorted(position_R, number_P, right=True) - 1
        self._outcome_Q = position_R[self._read_Q] * OUTCOMES + table.outcome[edge_Q]
        low_P, high_P = table.whole[node_R[self._last_P]].T
        return (
            torch.cat([self._state_R[self._read_Q], self._state_R[self._last_P]]),
            torch.cat([table.low[edge_Q], low_P]),
            torch.cat([table.high[edge_Q], high_P]),
        )

    def _probabilities(self, state_Q: Tensor, low_Q: Tensor, high_Q: Tensor) -> Tensor:
        first_Q, last_Q = low_Q // _BLOCK, high_Q // _BLOCK
        # Whole blocks are those after the first up to before the last, and none where both are one.
        self._state_Q, base_Q = state_Q, state_Q * (self._blocks + 1)
        self._starts_Q, self._ends_Q = base_Q + first_Q + 1, base_Q + last_Q.maximum(first_Q + 1)
        piece_2Q = torch.cat([first_Q, last_Q])
        from_2Q = torch.cat([low_Q, torch.where(last_Q > first_Q, last_Q * _BLOCK, high_Q)]) - piece_2Q * _BLOCK
        to_2Q = high_Q.repeat(2) - piece_2Q * _BLOCK
        # A range up to the end of the last block has no piece after it.
        self._pieces_2Q = state_Q.repeat(2) * self._blocks + piece_2Q.clamp_(max=self._blocks - 1)
        column_B = torch.arange(_BLOCK, device=low_Q.device, dtype=torch.int32)
        outside_2QB = (column_B < from_2Q.unsqueeze(1)).logical_or_(column_B >= to_2Q.unsqueeze(1))
        self._each_2QB = self._each_SV.view(-1, _BLOCK).index_select(0, self._pieces_2Q).masked_fill_(outside_2QB, 0.0)
        starts_Q, ends_Q = (self._upto_SK.view(-1).index_select(0, one) for one in (self._starts_Q, self._ends_Q))
        first_Q, last_Q = self._each_2QB.sum(-1).double().chunk(2)
        return (ends_Q - starts_Q + first_Q + last_Q) / self._total_S.index_select(0, state_Q)

    def logarithms(self) -> tuple[Tensor, Tensor]:
        """[P, 257], float64, logarithms of the outcomes' probabilities, from `found_Q` and `own_S`, differentiable.

        Also [P], without a gradient, the share that is missed at least.
        """
        positions = len(self._last_P)
        each_Q, whole_P = self.found_Q.split([len(self._read_Q), positions])
        # Of sequences up to a border further back, those that follow the model's tokens are a share of its probability.
        own_S = self.own_S.clamp(min=_LEAST)
        path_S = own_S.cumsum(0) - own_S
        gain_R = (path_S[self._state_R] - path_S[self._state_R + self._back_R]).clamp(max=300.0).exp()
        mass_PO = each_Q.new_zeros(positions * OUTCOMES)
        mass_PO = mass_PO.index_add(0, self._outcome_Q, each_Q * gain_R[self._read_Q]).view(positions, OUTCOMES)
        with torch.no_grad():
            begun_P = each_Q.new_zeros(len(self._state_R)).index_add(0, self._read_Q, each_Q)[self._last_P]
            escape_P = whole_P / (whole_P + begun_P).clamp(min=1e-300)
        share_PO = mass_PO / mass_PO.sum(-1, keepdim=True).clamp(min=1e-300)
        return (share_PO + _FLOOR).log(), escape_P

    def gradient_(self, upstream_Q: Tensor, upstream_S: Tensor) -> Tensor:
        """The gradient of the products with the head, [S, V], in their place, from those of `found_Q` and `own_S`."""
        by_state_Q = upstream_Q / self._total_S.index_select(0, self._state_Q)
        # The gradient of the sum of whole blocks is one more range of blocks.
        of_blocks_Q = by_state_Q * (self._ends_Q > self._starts_Q)
        slopes_SK = torch.zeros_like(self._upto_SK)
        slopes_SK.view(-1).index_add_(0, self._starts_Q, of_blocks_Q).index_add_(0, self._ends_Q, -of_blocks_Q)
        mean_S = upstream_S.index_add(0, self._state_Q, upstream_Q * self.found_Q.detach()) / self._total_S
        slopes_SK = slopes_SK.cumsum_(-1)[:, :-1].sub_(mean_S.unsqueeze(1))
        self._each_SV.view(len(mean_S), -1, _BLOCK).mul_(_finite(slopes_SK).unsqueeze(-1))
        self._each_2QB.mul_(_finite(by_state_Q).repeat(2).unsqueeze(1))
        self._each_SV.view(-1, _BLOCK).index_add_(0, self._pieces_2Q, self._each_2QB)
        self._each_SV.view(-1).index_add_(0, self._own_S, upstream_S.float())
        if self._slope_ST is not None:
            self._each_SV[:, : self._slope_ST.size(1)].mul_(self._slope_ST)
        return self._each_SV


def _finite(slopes: Tensor) -> Tensor:
    """In float32: the slope of what has no probability may be beyond it, and 0 times infinity is NaN."""
    most = torch.finfo(torch.float32).max
    return slopes.clamp(-most, most).float()
