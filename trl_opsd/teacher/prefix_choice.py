"""Chooses the prefixes that are worth a pass of their own; knows token ids and numbers of tokens only.

A pass costs its tokens, but at least as many as a pass takes anyway. What a prefix costs is compared with what its rows
then need not read, and the rows of one earlier call, as its keys and values are kept for later ones.

L tokens of a prompt without its last
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int64]
"""Token ids, [L]."""
Cut: TypeAlias = tuple[int, int]
"""The first tokens of a sequence, by its number in the order of all, and how many."""

LEAST = 32
"""Tokens by which a prefix is longer than one that it extends; more where prompts are long, for `MOST_NESTED`."""
MOST_NESTED = 128
"""Prefixes that each extend the one before."""


def in_common(one: Ids, other: Ids) -> int:
    """The number of tokens at the beginning that both have."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def chosen_prefixes(
    prompts: Sequence[Ids], lengths: Sequence[int], earlier: Sequence[Ids], kept: Sequence[Ids], pass_tokens: int
) -> list[Ids]:
    """The prefixes to use, shorter ones first.

    Args:
        prompts (`Sequence[Ids]`):
            Of each row, the tokens that may be in a prefix.
        lengths (`Sequence[int]`):
            Of each row, all tokens that have to be read.
        earlier (`Sequence[Ids]`):
            Prompts of earlier calls.
        kept (`Sequence[Ids]`):
            Prefixes that need not be read, nor do their beginnings.
        pass_tokens (`int`):
            Tokens of a pass below which fewer take as long.
    """
    number_of: dict[bytes, list[int]] = {}
    for row, ids in enumerate(prompts):
        number_of.setdefault(_order(ids), []).append(row)
    again = {_order(ids) for ids in earlier}
    every = {_order(ids): ids for ids in (*earlier, *kept, *prompts) if len(ids)}
    ordered = sorted(every)
    sequences = [every[key] for key in ordered]
    least = max(LEAST, max(map(len, sequences), default=0) // MOST_NESTED)
    shared = [in_common(one, other) for one, other in itertools.pairwise(sequences)]
    of_each = [number_of.get(key, []) for key in ordered]
    # Sums over the first sequences: rows, their tokens, sequences of earlier calls.
    rows = np.cumsum([0, *map(len, of_each)])
    tokens = np.cumsum([0, *(sum(lengths[row] for row in some) for some in of_each)])
    seen = np.cumsum([0, *(key in again for key in ordered)])

    @cache
    def cheapest(first: int, end: int, before: int) -> tuple[float, tuple[Cut, ...]]:
        """Of these sequences, whose first tokens need not be read: the tokens to read, and the prefixes to use."""
        if rows[first] == rows[end]:
            return 0, ()
        common = min(shared[first : end - 1], default=len(sequences[first]))
        best = apart(first, end, before, common)
        known = max((in_common(sequences[first][:common], one) for one in kept), default=0)
        new = common - max(known, before)
        if common - before < least or 0 < new < least:
            return best
        cost, cuts = apart(first, end, common, common)
        if new > 0:
            cost += max(new, pass_tokens) - (common - before) * (seen[end] > seen[first])
        return min(best, (cost, ((first, common), *cuts)), key=lambda one: one[0])

    @cache
    def apart(first: int, end: int, before: int, common: int) -> tuple[float, tuple[Cut, ...]]:
        """The same without another prefix that all share."""
        together = max(int(tokens[end] - tokens[first] - before * (rows[end] - rows[first])), pass_tokens)
        if end - first == 1:
            return together, ()
        ends = [place + 1 for place in range(first, end - 1) if shared[place] < common + least]
        parts = [cheapest(*part, before) for part in zip([first, *ends], [*ends, end], strict=True)]
        cost = sum(one for one, _ in parts)
        return (together, ()) if together <= cost else (cost, tuple(cut for _, cuts in parts for cut in cuts))

    _, cuts = cheapest(0, len(sequences), 0) if sequences else (0, ())
    return sorted((sequences[number][:length] for number, length in cuts), key=len)


def _order(ids: Ids) -> bytes:
    """Bytes that sort as the ids do."""
    return ids.astype(">i8").tobytes()
