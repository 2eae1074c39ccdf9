"""Which tokens spell which bytes, as ranges of one sorted order; byte positions of tokens, and targets for each.

V token ids · T tokens with a meaning · D nodes (distinct beginnings of tokens) · E edges between them
N tokens of a row · P byte positions, M of all rows · F forks · S states that are read · R reads · X leaves
"""

from __future__ import annotations

from collections.abc import Sequence
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

    token: Numbers
    """[P], int64: the number of each position's token."""
    fork: Numbers
    """[F, 3], int64: the position before which it ends, ascending; its parent; and its token."""
    reads: Numbers
    """[R, 3], int64: a position, ascending; a node; and the node of the table of the bytes between. Tokens that begin
    with them at that border are a part of the position's distribution."""
    leaves: Numbers
    """[X, 2], int64: a position, ascending, and a fork; sequences through it may be a part of its distribution."""
    read: Numbers = field(kw_only=True)
    """[F], bool: whether the states after these forks are computed; only together with those of their parents."""
    column: int = field(default=0, kw_only=True)
    """The column of a pass over completions after which the forks that are read come, in order."""

    @classmethod
    def joined(cls, trees: Sequence[CoveringTree]) -> CoveringTree:
        """The trees of texts that follow each other as one: its nodes are the borders of all tokens, then all forks."""
        nothing = (np.zeros(shape, np.int64) for shape in ((0,), (0, 3), (0, 3), (0, 2)))
        each = [cls(*nothing, read=np.zeros(0, bool)), *trees]
        parts = [(one.token, one.fork, one.reads, one.leaves, one.read) for one in each]
        sizes, forks, reads, leaves, _ = np.array([[*map(len, one)] for one in parts]).T
        tokens = np.array([one.tokens for one in each])
        of_positions, of_tokens, of_forks = (one.cumsum() - one for one in (sizes, tokens, forks))
        token_P, fork_F3, reads_R3, leaves_X2, read_F = map(np.concatenate, zip(*parts, strict=True))

        def moved(some_X3: Numbers, counts: Numbers) -> Numbers:
            more = np.repeat(np.stack([of_positions, of_tokens, tokens.sum() + of_forks - tokens, tokens]), counts, 1)
            nodes = some_X3[:, 1] + np.where(some_X3[:, 1] < more[3], more[1], more[2])
            return np.stack([some_X3[:, 0] + more[0], nodes, some_X3[:, 2]], 1)

        token_P = token_P + np.repeat(of_tokens, sizes)
        leaves_X2 = leaves_X2 + np.stack([np.repeat(of_positions, leaves), np.repeat(of_forks, leaves)], 1)
        return cls(token_P, moved(fork_F3, forks), moved(reads_R3, reads), leaves_X2, read=read_F)

    @property
    def tokens(self) -> int:
        """N, the row's tokens that have a position."""
        return int(self.token[-1]) + 1 if len(self.token) else 0

    def cut(self, positions: int) -> CoveringTree:
        """The tree of the first positions."""
        if positions >= len(self.token):
            return self
        whole, token = self.tokens, self.token[:positions]
        fork, reads, leaves = (one[one[:, 0] < positions] for one in (self.fork, self.reads, self.leaves))
        cut = CoveringTree(token, fork, reads, leaves, read=self.read[: len(fork)], column=self.column)
        for some in (fork, reads):
            some[some[:, 1] >= whole, 1] += cut.tokens - whole
        return cut

    def branches(self) -> tuple[list[int], list[int]]:
        """The tokens of the forks that are read, and for each the place of its parent: that of the row's token whose
        state it is, or, from `column` on, of a fork.
        """
        tokens, kept = self.tokens, self.read.nonzero()[0]
        place_F = self.column + self.read.cumsum() - 1
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


@dataclass(frozen=True, slots=True)
class Spelled:
    """The byte positions of the tokens in a loss, and the S states that they are summed from; in host memory.

    States are those that predict tokens of weight other than 0, those before them that they are summed from, and those
    after forks, row by row and by the bytes before them.
    """

    token: Tensor
    """[P], int64: index of the state before the token that each belongs to, ascending."""
    last: Tensor
    """[P], int64: the last state that each is summed from, or those before it; ascending."""
    missed: Tensor
    """[P], float32: as [`~ByteTargets.missed`]."""
    reads: Tensor
    """[R, 3], int64: as [`~CoveringTree.reads`], with the index of a state as the node."""
    leaves: Tensor
    """[X, 4], int64: a position; the state after which a fork that is not read begins; its token; and its number among
    the forks of all rows."""
    branches: Tensor
    """[Z, 3], int64: the index of a state after a fork, that of the state after its parent, and its token."""
    kept: Tensor
    """[P], int64: indices of these positions among all of the targets."""
    places: Tensor
    """[S], int64: places of these states in a pass."""

    @classmethod
    def of(
        cls, trees: Sequence[CoveringTree], missed: Sequence[Tensor] | None, starts: Sequence[int], places_K: Tensor,
        undecided: bool = False,
    ) -> Spelled:  # fmt: skip
        """The positions of the tokens at these places, ascending, where each row begins at its start.

        Of `None` nothing is known to be `missed`. `undecided` leaves also have the forks that follow others, as if
        these were theirs: before any is read.
        """
        whole, sizes, wanted = CoveringTree.joined(trees), [one.tokens for one in trees], places_K.numpy()
        token_M, fork_F3, reads_R3, leaves_X2, read_F = whole.token, whole.fork, whole.reads, whole.leaves, whole.read
        tokens = sum(sizes)
        own = [start + np.arange(size) for start, size in zip(starts, sizes, strict=True)]
        after = [start + one.column + np.arange(int(one.read.sum())) for start, one in zip(starts, trees, strict=True)]
        # States in order: of each node that is read the index of its state.
        nodes = np.concatenate([np.arange(tokens), tokens + read_F.nonzero()[0]])
        offset_N = np.searchsorted(token_M, np.arange(tokens))
        order = np.argsort(np.concatenate([offset_N, fork_F3[read_F, 0]]), kind="stable")
        place_S = np.concatenate([np.zeros(0, np.int64), *own, *after])[order]
        state = np.full(tokens + len(fork_F3), -1, np.int64)
        state[nodes[order]] = np.arange(len(order))
        # The first state that the path of each begins with.
        low_S = np.concatenate([state[:tokens], state[_own(fork_F3[:, 1], fork_F3, tokens)]])[nodes[order]]
        own_M, reads_R3 = state[token_M], reads_R3[state[reads_R3[:, 1]] >= 0]
        reads_R3[:, 1] = state[reads_R3[:, 1]]
        top_F, leaves_X2 = _unread(fork_F3, read_F, tokens), leaves_X2[~read_F[leaves_X2[:, 1]]]
        if not undecided:
            leaves_X2 = leaves_X2[top_F[leaves_X2[:, 1]] == leaves_X2[:, 1]]
        position_X, fork_X = leaves_X2.T
        origin_X3, branch_Z3 = fork_F3[top_F[fork_X]], fork_F3[read_F]
        leaves_X4 = np.stack([position_X, state[origin_X3[:, 1]], origin_X3[:, 2], fork_X], 1)
        branches_Z3 = np.stack([state[nodes[tokens:]], state[branch_Z3[:, 1]], branch_Z3[:, 2]], 1)
        counts_M = np.isin(place_S[own_M], wanted)
        # All states between those that a position depends on are read.
        first_M, last_M = own_M.copy(), own_M.copy()
        np.maximum.at(last_M, reads_R3[:, 0], reads_R3[:, 1])
        last_M = np.maximum.accumulate(last_M)
        for position, read in (reads_R3[:, :2].T, leaves_X4[:, :2].T):
            np.minimum.at(first_M, position, low_S[read])
        change = np.zeros(len(place_S) + 1, np.int64)
        np.add.at(change, first_M[counts_M], 1)
        np.add.at(change, last_M[counts_M] + 1, -1)
        is_read = (change.cumsum()[:-1] > 0) | np.isin(place_S, wanted)
        # Tokens without a position, which the teacher does not read, have their `-log p` and are counted all the same.
        others = np.setdiff1d(wanted, place_S)
        state_S, position_M = is_read.cumsum() - 1, counts_M.cumsum() - 1
        reads, leaves = (one[counts_M[one[:, 0]]] for one in (reads_R3, leaves_X4))
        branches = branches_Z3[is_read[branches_Z3[:, 0]]]
        for some in (reads, leaves):
            some[:, 0], some[:, 1] = position_M[some[:, 0]], state_S[some[:, 1]]
        branches[:, :2] = state_S[branches[:, :2]]
        kept = torch.from_numpy(counts_M.nonzero()[0])
        return cls(
            token=torch.from_numpy(state_S[own_M[counts_M]]),
            last=torch.from_numpy(state_S[last_M[counts_M]]),
            missed=torch.zeros(len(kept)) if missed is None else torch.cat([*missed, torch.zeros(0)])[kept],
            reads=torch.from_numpy(reads),
            leaves=torch.from_numpy(leaves),
            branches=torch.from_numpy(branches),
            kept=kept,
            places=torch.from_numpy(np.concatenate([place_S[is_read], others])),
        )


def _own(node_F: Numbers, fork_F3: Numbers, tokens: int) -> Numbers:
    """The border of the row's own tokens that the path of each node leaves them at."""
    while (is_fork := node_F >= tokens).any():
        node_F = np.where(is_fork, fork_F3[np.where(is_fork, node_F - tokens, 0), 1], node_F)
    return node_F


def _unread(fork_F3: Numbers, read_F: Numbers, tokens: int) -> Numbers:
    """The first fork on the path to each that is not read."""
    top_F = np.arange(len(fork_F3))
    while len(top_F):
        parent_F = fork_F3[top_F, 1] - tokens
        moves_F = (parent_F >= 0) & ~read_F[np.maximum(parent_F, 0)]
        if not moves_F.any():
            break
        top_F = np.where(moves_F, parent_F, top_F)
    return top_F
