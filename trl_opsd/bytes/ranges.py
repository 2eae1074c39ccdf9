"""The distribution of each next byte, as sums of ranges of the sorted vocabulary, and their gradient; tile by tile.

A range is whole blocks of columns, a difference of one cumulative sum of blocks, and a piece of a block at each end,
which is added up by itself. No small probability within a block is a difference of large ones.

S states · T tokens with a meaning · V columns of a tile, a multiple of blocks · K blocks of B columns
P byte positions · R reads: sums that a position adds, each of the ranges of a node · Q ranges
F forks that are not read · X pairs of them and positions that they may add to · Y steps of paths
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trl_opsd.bytes.table import OUTCOMES, ByteTable, Spelled
from trl_opsd.losses.side import STRIDE_ELEMENTS, Side, product_dtype
from trl_opsd.losses.streamed import memory_of, tile_of
from trl_opsd.types import LazyLogits
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
    """Consecutive states, those before them that they need, their byte positions, and what these are summed from."""

    tokens: slice
    states: slice
    positions: slice
    reads: slice
    leaves: slice
    chain: slice
    ranges: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of S states, their indices, copied to the device at once, and the head of the sorted tokens."""

    tiles: list[Tile]
    table: ByteTable
    side: Side
    memory_SV: Tensor
    """For the logits of any tile."""
    token_P: Tensor
    """The state before the token of each byte position, ascending; int32, as all that was copied."""
    missed_P: Tensor
    """As [`~bytes.table.Spelled.missed`]."""
    reads_3R: Tensor
    leaves_4X: Tensor
    path_3S: Tensor
    """Whether it is the state before a token of the row's own; the state that predicts that token or, after a fork, the
    fork's; and the state that its path begins with."""
    place_S: Tensor
    """The place of that token among the sorted ones."""
    chain_2Y: Tensor
    """A state after a fork, ascending, and one on the path to it, or itself."""

    @classmethod
    def of(
        cls, model: LazyLogits, chunk_tokens: int | None, table: ByteTable, ids: Tensor, spelled: Spelled,
        outcomes: bool = True,
    ) -> Plan:  # fmt: skip
        """Without `outcomes` a read has one range, of all tokens that go on."""
        states, device, host = len(model.hidden), model.head.weight.device, table.to(torch.device("cpu"))
        side = Side.of(model, product_dtype(model), None)
        token, reads, leaves = spelled.token, spelled.reads, spelled.leaves
        columns = -(-len(table.order) // STRIDE_ELEMENTS) * STRIDE_ELEMENTS
        node_R = reads[:, 2]
        ranges_R = (host.first[node_R + 1] - host.first[node_R]) if outcomes else torch.ones_like(node_R)
        ranges_R = ranges_R.cumsum(0)
        copied = 0 if (dtype := side.weight_VH.dtype) == torch.float32 else dtype.itemsize
        token_bytes = columns * (4 + 4 * (side.finish.cap is not None) + copied)
        token_bytes += (_RANGE_BYTES * int(ranges_R[-1:].sum()) + _POSITION_BYTES * len(token)) // max(1, states)
        size = max(1, min(states, chunk_tokens or tile_of(max(1, states), token_bytes, memory_of(device))))
        begins_S, chain_Y2 = _paths(spelled.branches, states)
        # The first state that each position needs, and so each tile.
        low_P = begins_S[token].clone()
        for some in (reads, leaves):
            low_P.scatter_reduce_(0, some[:, 0], begins_S[some[:, 1]], "amin")
        low_S = torch.arange(states).scatter_reduce_(0, spelled.last, low_P, "amin")
        low_S = low_S.flip(0).cummin(0).values.flip(0) if states else low_S
        state_C = torch.tensor([*range(0, states, size), states])
        position_C = torch.searchsorted(spelled.last, state_C)
        read_C, leaf_C = (torch.searchsorted(one[:, 0].contiguous(), position_C) for one in (reads, leaves))
        range_C = torch.cat([ranges_R.new_zeros(1), ranges_R])[read_C]
        first_C = low_S[state_C[:-1]]
        chain = chain_Y2[:, 0].contiguous()
        steps_2C = torch.searchsorted(chain, torch.stack([first_C, state_C[1:]]))
        each = ([slice(*pair) for pair in pairwise(one.tolist())] for one in (state_C, position_C, read_C, leaf_C))
        bounds = zip(*each, strict=True)
        more = zip(first_C.tolist(), *steps_2C.tolist(), range_C.diff().tolist(), strict=True)
        tiles = [
            Tile(tokens, slice(first, tokens.stop), positions, reads, leaves, slice(*steps), ranges)
            for (tokens, positions, reads, leaves), (first, *steps, ranges) in zip(bounds, more, strict=True)
        ]
        row_S, is_own_S = torch.arange(states), torch.ones(states, dtype=torch.long)
        after_Z, parent_Z, token_Z = spelled.branches.T
        row_S[after_Z], is_own_S[after_Z] = parent_Z, 0
        leaves = torch.cat([leaves[:, :2], host.rank[leaves[:, 2]].long()[:, None], leaves[:, 3:]], 1)
        path_3S, branch_2Z = torch.stack([is_own_S, row_S, begins_S]), torch.stack([after_Z, host.rank[token_Z]])
        sent = [token, reads.T, leaves.T, path_3S, chain_Y2.T, branch_2Z, spelled.missed.float().view(torch.int32)]
        sizes, table = [one.numel() for one in sent], table.to(device)
        block = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=has_streams(device))
        block = torch.cat([one.int().flatten() for one in sent], out=block).to(device, non_blocking=True)
        indices = [a.view(b.shape) for a, b in zip(block.split(sizes), sent, strict=True)]
        bias = side.finish.bias
        finish = replace(side.finish, bias=None if bias is None else bias.index_select(0, table.order))
        side = replace(side, weight_VH=side.weight_VH.index_select(0, table.order), finish=finish)
        most = max((one.states.stop - one.states.start for one in tiles), default=0)
        memory_SV = torch.empty(most, columns, device=device)
        token_P, reads_3R, leaves_4X, path_3S, chain_2Y, (after_Z, place_Z), missed_P = indices
        missed_P = missed_P.view(torch.float32)
        place_S = table.rank[ids.to(device, non_blocking=True)].index_copy(0, after_Z.long(), place_Z)
        return cls(tiles, table, side, memory_SV, token_P, missed_P, reads_3R, leaves_4X, path_3S, place_S, chain_2Y)


def _paths(branches_Z3: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """[S], the state that the path of each begins with; and [Y, 2], of each state after a fork those on its path."""
    begins_S, branch_S = torch.arange(states), torch.full((states,), -1)
    branch_S[branches_Z3[:, 0]] = torch.arange(len(branches_Z3))
    found, parent_Z = [branches_Z3[:, [0, 0]]], branches_Z3[:, 1].clone()
    state_Z = branches_Z3[:, 0]
    while len(state_Z):
        begins_S[state_Z] = parent_Z
        further_Z = branch_S[parent_Z] >= 0
        state_Z, parent_Z = state_Z[further_Z], parent_Z[further_Z]
        found.append(torch.stack([state_Z, parent_Z], 1))
        parent_Z = branches_Z3[branch_S[parent_Z], 1]
    chain_Y2 = torch.cat(found)
    return begins_S, chain_Y2[chain_Y2[:, 0].argsort(stable=True)]


class ByteTile:
    """The probabilities of a tile's states, in place of their logits, and the ranges that its byte positions sum."""

    def __init__(self, plan: Plan, tile: Tile, outcomes: bool = True) -> None:
        self._plan, self._tile = plan, tile
        self._weigh()
        position_R, state_R, node_R = plan.reads_3R[:, tile.reads]
        self._state_R, self._position_R = state_R - tile.states.start, position_R - tile.positions.start
        ranges = self._of_outcomes(node_R) if outcomes else self._of_all(node_R)
        self.found_Q = self._probabilities(*ranges)
        """[Q], float64: probabilities of the ranges of reads."""

    def _weigh(self) -> None:
        plan, tile = self._plan, self._tile
        self._each_SV = logits_SV = plan.memory_SV[: tile.states.stop - tile.states.start]
        states, width = logits_SV.shape
        is_own_S, row_S, begins_S = plan.path_3S[:, tile.states]
        logits_ST = logits_SV[:, : len(plan.table.order)]
        plan.side.project_(logits_ST, tile.states)
        plan.side.finish(logits_ST)
        self._slope_ST = plan.side.finish.slope(logits_ST)
        logits_SV[:, logits_ST.size(1) :] = -torch.inf
        # What comes before the tile is needed by none of its positions.
        row_S, self._begins_S = ((one - tile.states.start).clamp_(min=0) for one in (row_S, begins_S))
        self._is_own_S, self._own_S = is_own_S, row_S * width + plan.place_S[tile.states]
        highest_S1 = logits_SV.amax(-1, keepdim=True)
        own_S = logits_SV.view(-1).index_select(0, self._own_S) - highest_S1.squeeze(1).index_select(0, row_S)
        logits_SV.sub_(highest_S1).exp_()
        self._blocks = width // _BLOCK
        # In float64, as blocks at the end of the vocabulary are differences of sums near the whole.
        self._upto_SK = torch.zeros(states, self._blocks + 1, dtype=torch.float64, device=own_S.device)
        sums_SK = logits_SV.view(states, -1, _BLOCK).sum(-1)
        torch.cumsum(sums_SK, -1, dtype=torch.float64, out=self._upto_SK[:, 1:])
        self._total_S, self._row_S = self._upto_SK[:, -1].contiguous(), row_S
        self.own_S = own_S - self._total_S.log().index_select(0, row_S)
        """[S], float64: logarithms of the probabilities of the model's own tokens, or of the last on the path to it."""

    def _of_all(self, node_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """State, first column and the one after the last of all tokens that a read goes on with."""
        table = self._plan.table
        self._read_Q = torch.arange(len(node_R), device=node_R.device)
        return self._state_R, table.low[table.first[node_R]], table.high[table.first[node_R + 1] - 1]

    def _of_outcomes(self, node_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for each outcome of each read."""
        table, device = self._plan.table, node_R.device
        first_R = table.first[node_R]
        stop_R = (table.first[node_R + 1] - first_R).cumsum(0)
        range_Q = torch.arange(self._tile.ranges, device=device)
        self._read_Q = torch.searchsorted(stop_R, range_Q, right=True)
        edge_Q = table.first[node_R + 1][self._read_Q] - stop_R[self._read_Q] + range_Q
        self._outcome_Q = self._position_R[self._read_Q] * OUTCOMES + table.outcome[edge_Q]
        return self._state_R[self._read_Q], table.low[edge_Q], table.high[edge_Q]

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

    def _paths(self) -> Tensor:
        """[S], float64: logarithms of the probabilities of the tokens up to each state, from the tile's first."""
        own_S = self.own_S.clamp(min=_LEAST)
        along_S = own_S * self._is_own_S
        path_S = (along_S.cumsum(0) - along_S).index_select(0, self._begins_S)
        after_Y, on_path_Y = (self._plan.chain_2Y[:, self._tile.chain] - self._tile.states.start).clamp(min=0)
        return path_S.index_add(0, after_Y, own_S.index_select(0, on_path_Y))

    def _gain(self, path_S: Tensor, state_R: Tensor, position_R: Tensor) -> Tensor:
        """The probability of the tokens up to a state, as a share of that of the own ones up to a position's token."""
        token_P = self._plan.token_P[self._tile.positions] - self._tile.states.start
        return (path_S[state_R] - path_S[token_P[position_R]]).clamp(max=300.0).exp()

    @torch.no_grad()
    def _left(self, path_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The positions that forks may add to, their numbers, and the mass that leaves there at most."""
        position_X, state_X, place_X, fork_X = self._plan.leaves_4X[:, self._tile.leaves]
        position_X, state_X = position_X - self._tile.positions.start, state_X - self._tile.states.start
        each_X = self._each_SV.view(-1).index_select(0, state_X * self._each_SV.size(1) + place_X).double()
        share_X = each_X / self._total_S.index_select(0, state_X) * self._gain(path_S, state_X, position_X)
        return position_X, fork_X, share_X

    @torch.no_grad()
    def need_(self, needed_F: Tensor, follows_F: Tensor, most_missed: float) -> None:
        """Counts the positions of whose distribution a larger share than this may be missed without each fork."""
        path_S = self._paths()
        mass_P = self.found_Q.new_zeros(self._tile.positions.stop - self._tile.positions.start)
        mass_P.index_add_(0, self._position_R, self.found_Q * self._gain(path_S, self._state_R, self._position_R))
        position_X, fork_X, left_X = self._left(path_S)
        # Above 1 all is needed alike; larger ones would hide others in one long sum.
        ratio_X = (left_X / mass_P[position_X].clamp(min=1e-300)).nan_to_num(1.0).clamp_(max=1.0)
        most, follows_X = most_missed / (1 - most_missed), follows_F[fork_X]
        # Of each position those with the least mass stay unread. Forks that follow others have a part of their mass.
        order_X = ratio_X.argsort()
        order_X = order_X[position_X[order_X].argsort(stable=True)]
        sums_X = (ratio_X * ~follows_X)[order_X].cumsum(0)
        position_X = position_X[order_X]
        before_P = torch.searchsorted(position_X, torch.arange(len(mass_P), device=sums_X.device, dtype=torch.int32))
        sums_X = sums_X - torch.cat([sums_X.new_zeros(1), sums_X])[before_P[position_X]]
        # rounding of one long sum
        needs_X = torch.where(follows_X[order_X], ratio_X[order_X] > most / 4, sums_X > most * (1 + 1e-6) + 1e-12)
        needed_F.index_add_(0, fork_X[order_X], needs_X.int())

    def logarithms(self) -> tuple[Tensor, Tensor]:
        """[P, 257], float64, logarithms of the outcomes' probabilities, from `found_Q` and `own_S`, differentiable.

        Also [P], without a gradient, an upper bound on the share that is missed.
        """
        positions, path_S = self._tile.positions.stop - self._tile.positions.start, self._paths()
        gain_R = self._gain(path_S, self._state_R, self._position_R)
        mass_PO = self.found_Q.new_zeros(positions * OUTCOMES)
        mass_PO = mass_PO.index_add(0, self._outcome_Q, self.found_Q * gain_R[self._read_Q]).view(positions, OUTCOMES)
        mass_P1 = mass_PO.sum(-1, keepdim=True)
        position_X, _, left_X = self._left(path_S)
        left_P = left_X.new_zeros(positions).index_add_(0, position_X, left_X)
        missed_P = left_P / (left_P + mass_P1.detach().squeeze(1)).clamp(min=1e-300)
        return (mass_PO / mass_P1.clamp(min=1e-300) + _FLOOR).log(), missed_P

    def gradient_(self, upstream_Q: Tensor, upstream_S: Tensor) -> Tensor:
        """The gradient of the products with the head, [S, V], in their place, from those of `found_Q` and `own_S`."""
        by_state_Q = upstream_Q / self._total_S.index_select(0, self._state_Q)
        # The gradient of the sum of whole blocks is one more range of blocks.
        of_blocks_Q = by_state_Q * (self._ends_Q > self._starts_Q)
        slopes_SK = torch.zeros_like(self._upto_SK)
        slopes_SK.view(-1).index_add_(0, self._starts_Q, of_blocks_Q).index_add_(0, self._ends_Q, -of_blocks_Q)
        mean_S = torch.zeros_like(upstream_S).index_add_(0, self._row_S, upstream_S)
        mean_S = mean_S.index_add_(0, self._state_Q, upstream_Q * self.found_Q.detach()) / self._total_S
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
