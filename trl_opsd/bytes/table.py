"""Token vocabularies as bytes: which tokens spell which bytes, as ranges of one sorted order, and targets per byte.

V token ids · T tokens with a meaning · D nodes (distinct beginnings of tokens) · E edges between them
N tokens of a completion · P byte positions · F forks · S states that are read · R reads · X exits
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trl_opsd.types.loss import OutputHead
from trl_opsd.types.targets import RowTargets

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]
END = 256
"""The outcome of a position that is no byte: the end of the text, or any other special token."""
OUTCOMES = 257
"""The bytes, and [`END`]."""
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
    _copies: dict[torch.device, ByteTable] = field(default_factory=dict, init=False, repr=False)

    def to(self, device: torch.device) -> ByteTable:
        """A copy on a device, made once."""
        if device == self.order.device:
            return self
        if device not in self._copies:
            values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
            self._copies[device] = ByteTable(**{name: one.to(device) for name, one in values.items()})
        return self._copies[device]


@dataclass(frozen=True, slots=True, eq=False)
class CoveringTree:
    """The places of a row where a sequence of tokens that a model may have written has a border; all in host memory.

    Nodes are numbered: the borders before the row's N tokens, and then F forks, borders that its tokens do not have. A
    fork that is `read` is a further token of a forward pass, which follows the node that is its parent.
    """

    token: Tensor
    """[P], int64: the number of each position's token."""
    fork: Tensor
    """[F, 3], int64: the position before which it ends, ascending; its parent; and its token."""
    reads: Tensor
    """[R, 3], int64: a position, ascending; a node; and the node of the table of the bytes between. Tokens that begin
    with them at that border are a part of the position's distribution."""
    leaves: Tensor
    """[X, 2], int64: a position, ascending, and a fork; sequences through it may be a part of its distribution."""
    read: Tensor
    """[F], bool: whether the states after these forks are computed; only together with those of their parents."""
    column: int = 0
    """The column of a pass over completions after which the forks that are read come, in order."""

    @classmethod
    def of(cls, token_P: Numbers, fork_F3: Numbers, reads_R3: Numbers, leaves_X2: Numbers) -> CoveringTree:
        """A tree without forks to read."""
        token, fork, reads, leaves = (
            torch.from_numpy(np.ascontiguousarray(one, np.int64)) for one in (token_P, fork_F3, reads_R3, leaves_X2)
        )
        return cls(token, fork, reads, leaves, torch.zeros(len(fork), dtype=torch.bool))

    @property
    def tokens(self) -> int:
        """N, the row's tokens that have a position."""
        return int(self.token[-1]) + 1 if len(self.token) else 0

    def cut(self, positions: int) -> CoveringTree:
        """The tree of the first positions."""
        if positions >= len(self.token):
            return self
        whole, token = self.tokens, self.token[:positions]
        tokens = int(token[-1]) + 1 if positions else 0
        kept = int(torch.searchsorted(self.fork[:, 0].contiguous(), positions))

        def moved(nodes: Tensor) -> Tensor:
            return torch.where(nodes >= whole, nodes - whole + tokens, nodes)

        fork, reads = self.fork[:kept].clone(), self.reads[self.reads[:, 0] < positions].clone()
        fork[:, 1], reads[:, 1] = moved(fork[:, 1]), moved(reads[:, 1])
        leaves = self.leaves[(self.leaves[:, 0] < positions)]
        return CoveringTree(token, fork, reads, leaves, self.read[:kept], self.column)

    def branches(self) -> tuple[list[int], list[int]]:
        """The tokens of the forks that are read, and for each the place of its parent: that of the row's token whose
        state it is, or, from `column` on, of a fork.
        """
        tokens, kept = self.tokens, self.read.nonzero().squeeze(1)
        place_F = self.column + self.read.long().cumsum(0) - 1
        parents = [
            int(place_F[parent - tokens]) if parent >= tokens else parent for parent in self.fork[kept, 1].tolist()
        ]
        return self.fork[kept, 2].tolist(), parents


@dataclass(frozen=True, slots=True)
class ByteTargets(RowTargets):
    """A teacher's distributions over the next byte of one row; `hidden` [P, 257] holds their logarithms, in nats.

    `places` [P] are the positions of the student's tokens that the bytes belong to, not ascending strictly.
    """

    missed: Tensor
    """[P], float32, in host memory: the share of the teacher's distribution that may be missing."""
    tree: CoveringTree
    """Of the student's tokens."""

    def cut(self, tokens: int) -> RowTargets:
        kept = int(torch.searchsorted(self.places, tokens))
        if kept == len(self.places):
            return self
        return replace(
            self,
            hidden=self.hidden[:kept],
            places=self.places[:kept],
            missed=self.missed[:kept],
            tree=self.tree.cut(kept),
        )


def byte_head(device: torch.device) -> OutputHead:
    """The head of logarithms of distributions over bytes: they are logits."""
    return OutputHead(torch.eye(OUTCOMES, device=device))
