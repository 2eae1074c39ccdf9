"""Token vocabularies as bytes: which tokens spell which bytes, as ranges of one sorted order, and targets per byte.

V token ids · T tokens with a meaning · D nodes (distinct beginnings of tokens) · E edges between them
N tokens of a completion · P byte positions · R reads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from trl_opsd.types.loss import OutputHead
from trl_opsd.types.targets import RowTargets

END = 256
"""The outcome of a position that is no byte: the end of the text, or any other special token."""
OUTCOMES = 257
"""The bytes, and [`END`]."""
BACK = 3
"""Tokens before a byte's own whose states are read at most."""
ROOT = 0
"""The node of the empty beginning."""


@dataclass(frozen=True, slots=True, eq=False)
class ByteTable:
    """A vocabulary, sorted by bytes, so that the tokens that begin with given bytes are one range of it."""

    order: Tensor
    """[T], int32: token ids by their bytes, special tokens last. Ids that are no tokens are left out."""
    rank: Tensor
    """[V], int32: the place of each id in `order`; 0 for those that are left out."""
    first: Tensor
    """[D + 1], int32: each node's first edge."""
    outcome: Tensor
    """[E], int32: the byte of an edge, or [`END`]."""
    low: Tensor
    """[E], int32: first place of the tokens that begin with the node's bytes and this one."""
    high: Tensor
    """[E], int32: the place after the last of them."""
    length: Tensor
    """[V], int32: the byte positions of each id, 1 for a special token."""
    whole: Tensor
    """[D, 2], int32: first place, and the one after the last, of the tokens that are just a node's bytes."""
    _copies: dict[torch.device, ByteTable] = field(default_factory=dict, init=False, repr=False)

    def to(self, device: torch.device) -> ByteTable:
        """A copy on a device, made once."""
        if device == self.order.device:
            return self
        if device not in self._copies:
            values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
            self._copies[device] = ByteTable(**{name: one.to(device) for name, one in values.items()})
        return self._copies[device]


@dataclass(frozen=True, slots=True)
class ByteTargets(RowTargets):
    """A teacher's distributions over the next byte of one row; `hidden` [P, 257] holds their logarithms, in nats.

    `places` [P] are the positions of the student's tokens that the bytes belong to, not ascending strictly.
    """

    by_byte: ClassVar[bool] = True
    held: Tensor
    """[P], bool, in host memory: whether the teacher's distribution is exact enough to be compared."""
    reads: Tensor
    """[R, 4], int32, in host memory: what the student's distributions are summed from. Each has the number of its byte
    position, ascending; the place of the token whose state is read, and how many tokens before the byte's own that is;
    and the node of the bytes between."""

    def cut(self, tokens: int) -> RowTargets:
        kept = int(torch.searchsorted(self.places, tokens))
        if kept == len(self.places):
            return self
        return replace(
            self,
            hidden=self.hidden[:kept],
            places=self.places[:kept],
            held=self.held[:kept],
            reads=self.reads[: int(torch.searchsorted(self.reads[:, 0].contiguous(), kept))],
        )


@dataclass(frozen=True, slots=True)
class Spelled:
    """The byte positions of the tokens in a loss, among the N tokens that are read for them; indices in host memory."""

    token: Tensor
    """[P], int64: index of the token that each belongs to, ascending."""
    held: Tensor
    """[P], bool: as [`~ByteTargets.held`]."""
    reads: Tensor
    """[R, 4], int32: as [`~ByteTargets.reads`], with the index of the token among the N."""
    kept: Tensor
    """[P], int64: indices of these positions among all of the targets."""
    places: Tensor
    """[N], int64: places of the tokens in the loss and of those that are read for them, ascending."""

    @classmethod
    def of(cls, rows: Sequence[ByteTargets], starts: Sequence[int], places_K: Tensor) -> Spelled:
        """The positions of the tokens at these places, ascending, where each row begins at its start."""
        if not rows or not len(places_K):
            none = torch.zeros(0, dtype=torch.long)
            return cls(none, none.bool(), none.int().reshape(0, 4), none, places_K)
        at_M = torch.cat([one.places + start for one, start in zip(rows, starts, strict=True)])
        is_read = torch.zeros(1 + int(torch.cat([at_M, places_K]).max()), dtype=torch.bool)
        is_read[places_K] = True
        counts_M = is_read[at_M]
        sizes = accumulate((len(one.places) for one in rows), initial=0)
        reads_R4 = torch.cat(
            [
                one.reads + one.reads.new_tensor([before, start, 0, 0])
                for one, start, before in zip(rows, starts, sizes, strict=False)
            ]
        )
        position_R, state_R, back_R, node_R = reads_R4[counts_M[reads_R4[:, 0]]].T.contiguous()
        # A read further back takes the probabilities of all tokens in between, whether or not these count.
        for some in range(BACK + 1):
            is_read[state_R + back_R.clamp(max=some)] = True
        index, number_M = is_read.cumsum(0) - 1, counts_M.cumsum(0, dtype=torch.int32) - 1
        held_M = torch.cat([one.held for one in rows])
        return cls(
            token=index[at_M[counts_M]],
            held=held_M[counts_M],
            reads=torch.stack([number_M[position_R], index[state_R].int(), back_R, node_R], 1),
            kept=counts_M.nonzero().squeeze(1),
            places=is_read.nonzero().squeeze(1),
        )


def byte_head(device: torch.device) -> OutputHead:
    """The head of logarithms of distributions over bytes: they are logits."""
    return OutputHead(torch.eye(OUTCOMES, device=device))
