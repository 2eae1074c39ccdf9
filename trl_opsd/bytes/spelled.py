"""The byte positions of the tokens in a loss, and the states of a pass that their distributions are summed from.

N tokens of a row · P byte positions, M of all rows · S states that are read · F forks · R reads · X leaves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trl_opsd.bytes.table import CoveringTree, Numbers


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
        cls, trees: Sequence[CoveringTree], missed: Sequence[Tensor], starts: Sequence[int], places_K: Tensor,
        undecided: bool = False,
    ) -> Spelled:  # fmt: skip
        """The positions of the tokens at these places, ascending, where each row begins at its start.

        `undecided` leaves also have the forks that follow others, as if these were theirs: before any is read.
        """
        joined = _Joined.of(trees, starts, undecided)
        wanted = places_K.numpy()
        counts_M = np.isin(joined.place_S[joined.own_M], wanted)
        # All states between those that a position depends on are read.
        own_M, low_M, last_M = joined.own_M, joined.own_M.copy(), joined.own_M.copy()
        np.maximum.at(last_M, joined.reads_R3[:, 0], joined.reads_R3[:, 1])
        last_M = np.maximum.accumulate(last_M)
        for position, state in (joined.reads_R3[:, :2].T, joined.leaves_X4[:, :2].T):
            np.minimum.at(low_M, position, joined.low_S[state])
        change = np.zeros(len(joined.place_S) + 1, np.int64)
        np.add.at(change, low_M[counts_M], 1)
        np.add.at(change, last_M[counts_M] + 1, -1)
        is_read = (change.cumsum()[:-1] > 0) | np.isin(joined.place_S, wanted)
        # Tokens without a position, which the teacher does not read, have their `-log p` and are counted all the same.
        others = np.setdiff1d(wanted, joined.place_S)
        state_S, position_M = is_read.cumsum() - 1, counts_M.cumsum() - 1
        reads = joined.reads_R3[counts_M[joined.reads_R3[:, 0]]]
        leaves = joined.leaves_X4[counts_M[joined.leaves_X4[:, 0]]]
        branches = joined.branches_Z3[is_read[joined.branches_Z3[:, 0]]]
        for some in (reads, leaves):
            some[:, 0], some[:, 1] = position_M[some[:, 0]], state_S[some[:, 1]]
        branches[:, :2] = state_S[branches[:, :2]]
        kept = torch.from_numpy(counts_M.nonzero()[0])
        return cls(
            token=torch.from_numpy(state_S[own_M[counts_M]]),
            last=torch.from_numpy(state_S[last_M[counts_M]]),
            missed=torch.cat([*missed, torch.zeros(0)])[kept],
            reads=torch.from_numpy(reads),
            leaves=torch.from_numpy(leaves),
            branches=torch.from_numpy(branches),
            kept=kept,
            places=torch.from_numpy(np.concatenate([joined.place_S[is_read], others])),
        )


@dataclass(frozen=True, slots=True)
class _Joined:
    """The trees of several rows as one, with the states in order."""

    place_S: Numbers
    low_S: Numbers
    """The first state that the path of each begins with."""
    own_M: Numbers
    reads_R3: Numbers
    leaves_X4: Numbers
    branches_Z3: Numbers

    @classmethod
    def of(cls, trees: Sequence[CoveringTree], starts: Sequence[int], undecided: bool) -> _Joined:
        parts = list[tuple[Numbers, ...]]()
        states = positions = forks = 0
        for tree, start in zip(trees, starts, strict=True):
            tokens, token_P, fork_F3 = tree.tokens, tree.token.numpy(), tree.fork.numpy()
            reads_R3, leaves_X2, read_F = tree.reads.numpy(), tree.leaves.numpy(), tree.read.numpy()
            nodes = np.concatenate([np.arange(tokens), tokens + read_F.nonzero()[0]])
            places = np.concatenate([np.arange(tokens), tree.column + np.arange(len(nodes) - tokens)]) + start
            offset_N = np.searchsorted(token_P, np.arange(tokens))
            order = np.argsort(np.concatenate([offset_N, fork_F3[read_F, 0]]), kind="stable")
            # Of each node that is read the index of its state.
            state = np.full(tokens + len(fork_F3), -1, np.int64)
            state[nodes[order]] = np.arange(len(order))
            low = np.concatenate([state[:tokens], state[_own(fork_F3[:, 1], fork_F3, tokens)]])
            top_F = _unread(fork_F3, read_F, tokens)
            leaves_X2 = leaves_X2[~read_F[leaves_X2[:, 1]]]
            if not undecided:
                leaves_X2 = leaves_X2[top_F[leaves_X2[:, 1]] == leaves_X2[:, 1]]
            position_X, fork_X = leaves_X2.T
            origin_X3 = fork_F3[top_F[fork_X]]
            reads_R3, branch_Z3 = reads_R3[state[reads_R3[:, 1]] >= 0], fork_F3[read_F]
            of_forks = position_X + positions, state[origin_X3[:, 1]] + states, origin_X3[:, 2], fork_X + forks
            parts.append(
                (
                    places[order],
                    low[nodes[order]] + states,
                    state[token_P] + states,
                    np.stack([reads_R3[:, 0] + positions, state[reads_R3[:, 1]] + states, reads_R3[:, 2]], 1),
                    np.stack(of_forks, 1),
                    np.stack([state[nodes[tokens:]] + states, state[branch_Z3[:, 1]] + states, branch_Z3[:, 2]], 1),
                )
            )
            states, positions, forks = states + len(order), positions + len(token_P), forks + len(fork_F3)
        nothing = [np.zeros(shape, np.int64) for shape in ((0,), (0,), (0,), (0, 3), (0, 4), (0, 3))]
        return cls(*(np.concatenate(each) for each in zip(nothing, *parts, strict=True)))


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
