"""The distribution of each next byte, as sums of ranges of the sorted vocabulary, and their gradient; tile by tile.

A range is whole blocks of columns, a difference of one cumulative sum of blocks, and a piece of a block at each end,
which is added up by itself. No small probability within a block is a difference of large ones.

S states of a tile · T tokens with a meaning · V columns of a tile, a multiple of blocks · K blocks of B columns
P byte positions · R reads: sums that a position adds, each of the ranges of a node · Q ranges
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trl_opsd.losses.streamed import _GROUP_TILES, _STRIDE_ELEMENTS, _product_dtype, memory_of, tile_of
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


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive tokens, the states that they read, their byte positions, and their reads."""

    tokens: slice
    states: slice
    positions: slice
    reads: slice
    ranges: int
    """How many ranges these reads have."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of N tokens, and the indices of all of them on the device, which are copied there once."""

    tiles: list[Tile]
    table: ByteTable
    token_P: Tensor
    """The token of each byte position, ascending; int32, as `reads_4R` and `more`."""
    reads_4R: Tensor
    more: list[Tensor]
    """What else was copied."""

    @classmethod
    def of(
        cls, model: LazyLogits, chunk_tokens: int | None, table: ByteTable, token: Tensor, reads: Tensor, *more: Tensor
    ) -> Plan:
        """`token`, `reads` and `more`, which is copied with them, in host memory."""
        tokens, device, host = len(model.hidden), model.head.weight.device, table.to(torch.device("cpu"))
        node_R, position_R = reads[:, 3], reads[:, 0].contiguous()
        ranges_R = (host.first[node_R + 1] - host.first[node_R]).cumsum(0)
        dtype = _product_dtype(model)
        token_bytes = _columns(table) * (4 + 4 * (model.head.softcap is not None) + _GROUP_TILES * dtype.itemsize)
        token_bytes += (_RANGE_BYTES * int(ranges_R[-1:].sum()) + _POSITION_BYTES * len(token)) // max(1, tokens)
        size = max(1, min(tokens, chunk_tokens or tile_of(max(1, tokens), token_bytes, memory_of(device))))
        token_C = torch.tensor([*range(0, tokens, size), tokens])
        position_C = torch.searchsorted(token, token_C)
        read_C = torch.searchsorted(position_R, position_C)
        range_C = torch.cat([ranges_R.new_zeros(1), ranges_R])[read_C]
        bounds = zip(*(one.tolist() for one in (token_C, position_C, read_C, range_C)), strict=True)
        tiles = [
            Tile(slice(at, to), slice(max(0, at - BACK), to), slice(*positions), slice(*reads), last - first)
            for (at, *a, first), (to, *b, last) in pairwise(bounds)
            for positions, reads in [zip(a, b, strict=True)]
        ]
        given = [token, reads.T, *more]
        sizes = [one.numel() for one in given]
        sent = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=has_streams(device))
        sent = torch.cat([one.int().flatten() for one in given], out=sent).to(device, non_blocking=True)
        token_P, reads_4R, *rest = (a.view(b.shape) for a, b in zip(sent.split(sizes), given, strict=True))
        return cls(tiles, table.to(device), token_P, reads_4R, rest)

    def memory(self) -> Tensor:
        """Of the logits of a tile."""
        states = max((one.states.stop - one.states.start for one in self.tiles), default=0)
        return torch.empty(states, _columns(self.table), device=self.token_P.device)


class SortedTile:
    """The probabilities of the states of a tile, in place of its logits [S, V], and then the gradient of these.

    Args:
        logits_SV (`torch.Tensor`):
            Logits of the T sorted tokens; what is in the columns beyond is ignored.
        own_S (`torch.Tensor`):
            Columns of the model's own tokens.
    """

    def __init__(self, logits_SV: Tensor, tokens: int, own_S: Tensor) -> None:
        states, width = logits_SV.shape
        logits_SV[:, tokens:] = -torch.inf
        self._own_S = torch.arange(states, device=own_S.device, dtype=torch.int32) * width + own_S
        highest_S1 = logits_SV.amax(-1, keepdim=True)
        own_S = logits_SV.view(-1).index_select(0, self._own_S) - highest_S1.squeeze(1)
        self._each_SV = logits_SV.sub_(highest_S1).exp_()
        self._blocks = width // _BLOCK
        sums_SK = logits_SV.view(states, -1, _BLOCK).sum(-1)
        # In float64, as blocks at the end of the vocabulary are differences of sums near the whole.
        self._upto_SK = torch.zeros(states, self._blocks + 1, dtype=torch.float64, device=own_S.device)
        torch.cumsum(sums_SK, -1, dtype=torch.float64, out=self._upto_SK[:, 1:])
        self._total_S = self._upto_SK[:, -1].contiguous()
        self.own_S = own_S - self._total_S.log()
        """[S], float64: logarithms of the probabilities of the own tokens."""

    def probabilities(self, state_Q: Tensor, low_Q: Tensor, high_Q: Tensor) -> Tensor:
        """The probabilities of ranges of columns, [Q], float64."""
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
        self._found_Q = (ends_Q - starts_Q + first_Q + last_Q) / self._total_S.index_select(0, state_Q)
        return self._found_Q

    def gradient_(self, upstream_Q: Tensor, upstream_S: Tensor) -> Tensor:
        """The gradient of the logits, [S, V], from those of [`~SortedTile.probabilities`] and of `own_S`."""
        by_state_Q = upstream_Q / self._total_S.index_select(0, self._state_Q)
        # The gradient of the sum of whole blocks is one more range of blocks.
        of_blocks_Q = by_state_Q * (self._ends_Q > self._starts_Q)
        slopes_SK = torch.zeros_like(self._upto_SK)
        slopes_SK.view(-1).index_add_(0, self._starts_Q, of_blocks_Q).index_add_(0, self._ends_Q, -of_blocks_Q)
        mean_S = upstream_S.index_add(0, self._state_Q, upstream_Q * self._found_Q) / self._total_S
        slopes_SK = slopes_SK.cumsum_(-1)[:, :-1].sub_(mean_S.unsqueeze(1))
        self._each_SV.view(len(mean_S), -1, _BLOCK).mul_(_finite(slopes_SK).unsqueeze(-1))
        self._each_2QB.mul_(_finite(by_state_Q).repeat(2).unsqueeze(1))
        self._each_SV.view(-1, _BLOCK).index_add_(0, self._pieces_2Q, self._each_2QB)
        self._each_SV.view(-1).index_add_(0, self._own_S, upstream_S.float())
        return self._each_SV


def _finite(slopes: Tensor) -> Tensor:
    """In float32: the slope of what has no probability may be beyond it, and 0 times infinity is NaN."""
    most = torch.finfo(torch.float32).max
    return slopes.clamp(-most, most).float()


class Positions:
    """The byte positions of a tile, and the ranges that are summed for them."""

    def __init__(self, plan: Plan, tile: Tile) -> None:
        table, device = plan.table, plan.reads_4R.device
        position_R, state_R, self._back_R, node_R = plan.reads_4R[:, tile.reads]
        self._state_R, position_R = state_R - tile.states.start, position_R - tile.positions.start
        first_R = table.first[node_R]
        stop_R = (table.first[node_R + 1] - first_R).cumsum(0)
        range_Q = torch.arange(tile.ranges, device=device)
        self._read_Q = torch.searchsorted(stop_R, range_Q, right=True)
        edge_Q = table.first[node_R + 1][self._read_Q] - stop_R[self._read_Q] + range_Q
        # The read at the border before a position's own token is its last.
        self._numbers_P = torch.arange(tile.positions.stop - tile.positions.start, device=device, dtype=torch.int32)
        self._last_P = torch.searchsorted(position_R, self._numbers_P, right=True) - 1
        self._outcome_Q = position_R[self._read_Q] * OUTCOMES + table.outcome[edge_Q]
        whole_P2 = table.whole[node_R[self._last_P]]
        self.ranges = (
            torch.cat([self._state_R[self._read_Q], self._state_R[self._last_P]]),
            torch.cat([table.low[edge_Q], whole_P2[:, 0]]),
            torch.cat([table.high[edge_Q], whole_P2[:, 1]]),
        )
        """State, first column and the one after the last: of the ranges of reads, then of one for each position, the
        tokens that are all of its own token's bytes so far."""

    def logarithms(self, found_Q: Tensor, own_S: Tensor) -> tuple[Tensor, Tensor]:
        """[P, 257], float64, logarithms of the outcomes' probabilities, from those of the ranges and of own tokens.

        Also [P], without a gradient, the share that is missed at least.
        """
        positions = len(self._numbers_P)
        each_Q, whole_P = found_Q.split([len(self._read_Q), positions])
        # Of sequences up to a border further back, those that follow the model's tokens are a share of its probability.
        own_S = own_S.clamp(min=_LEAST)
        path_S = own_S.cumsum(0) - own_S
        gain_R = (path_S[self._state_R] - path_S[self._state_R + self._back_R]).clamp(max=300.0).exp()
        mass_PO = each_Q.new_zeros(positions * OUTCOMES)
        mass_PO = mass_PO.index_add(0, self._outcome_Q, each_Q * gain_R[self._read_Q]).view(positions, OUTCOMES)
        with torch.no_grad():
            begun_P = each_Q.new_zeros(len(self._state_R)).index_add(0, self._read_Q, each_Q)[self._last_P]
            escape_P = whole_P / (whole_P + begun_P).clamp(min=1e-300)
        share_PO = mass_PO / mass_PO.sum(-1, keepdim=True).clamp(min=1e-300)
        return (share_PO + _FLOOR).log(), escape_P


def _columns(table: ByteTable) -> int:
    """Columns of a tile."""
    return -(-len(table.order) // _STRIDE_ELEMENTS) * _STRIDE_ELEMENTS
