"""Splits rows into groups that are read together, such that little of what is read is padding; knows lengths only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Fits = Callable[[int, int], bool]
"""`fits(tokens, width)`: whether a group may have so many tokens, padding included, in rows of that width."""


def fewest_groups(lengths: Sequence[int], fits: Fits, packed: bool = False) -> list[list[int]]:
    """As few groups as fit, longest rows first; a row that does not fit is a group by itself.

    Args:
        lengths (`Sequence[int]`):
            Tokens of each row.
        fits (`Callable`):
            Whether a group may be read.
        packed (`bool`, *optional*, defaults to `False`):
            Whether the rows of a group are read as one. Otherwise they are padded to the longest.

    Returns:
        `list[list[int]]`: the row numbers of each group.
    """
    groups: list[list[int]] = []
    tokens: list[int] = []
    for row in longest_first(lengths):
        # Padded rows join the latest group, whose rows are the most alike; packed ones the first that has room.
        for number in range(len(groups)) if packed else range(len(groups))[-1:]:
            width = lengths[groups[number][0]]
            more = tokens[number] + (lengths[row] if packed else width)
            if fits(more, more if packed else width):
                groups[number].append(row)
                tokens[number] = more
                break
        else:
            groups.append([row])
            tokens.append(lengths[row])
    return groups


def cheapest_groups(lengths: Sequence[int], fits: Fits, least: float) -> list[list[int]]:
    """Padded groups that cost the least in all, longest rows first, where a group costs its tokens but not less than
    `least`; of equal costs, the fewest groups. A row that does not fit is a group by itself.

    Args:
        lengths (`Sequence[int]`):
            Tokens of each row.
        fits (`Callable`):
            Whether a group may be read; if not, then neither a larger one.
        least (`float`):
            Tokens that cost as much as fewer do.
    """
    order = longest_first(lengths)
    # An entry for each number of rows: what their groups cost, how many they are, and where the last begins, negated.
    best: list[tuple[float, int, int]] = [(0, 0, 0)]
    for end in range(1, len(order) + 1):
        found = (math.inf, end + 1, -end)
        for begin in range(end - 1, -1, -1):
            width = lengths[order[begin]]
            tokens = width * (end - begin)
            if begin < end - 1 and not fits(tokens, width):
                break
            cost, number, _ = best[begin]
            found = min(found, (cost + max(tokens, least), number + 1, -begin))
        best.append(found)
    groups, end = [], len(order)
    while end:
        begin = -best[end][2]
        groups.append(order[begin:end])
        end = begin
    return groups[::-1]


def even_groups(lengths: Sequence[int], number: int, packed: bool = False) -> list[list[int]]:
    """As many groups as asked for, none empty, whose largest has as few tokens as possible.

    Args:
        lengths (`Sequence[int]`):
            Tokens of at least `number` rows.
        number (`int`):
            Number of groups.
        packed (`bool`, *optional*, defaults to `False`):
            As in [`fewest_groups`].
    """

    def within(most: int) -> list[list[int]]:
        return fewest_groups(lengths, lambda tokens, *_: tokens <= most, packed)

    below, enough = 0, len(lengths) * max(lengths)
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (middle, enough) if len(within(middle)) > number else (below, middle)
    groups = within(enough)
    while len(groups) < number:
        largest = max(groups, key=lambda rows: (len(rows) > 1, sum(lengths[row] for row in rows)))
        groups.remove(largest)
        half = len(largest) // 2
        groups += [largest[::2], largest[1::2]] if packed else [largest[:half], largest[half:]]
    return sorted(groups, key=lambda rows: -lengths[rows[0]])


def equal_groups(lengths: Sequence[int], number: int, packed: bool = False) -> list[list[int]]:
    """Groups of equally many rows: of similar lengths or, packed, of similar sums."""
    order, rows = longest_first(lengths), len(lengths) // number
    if not packed:
        return [order[start : start + rows] for start in range(0, len(order), rows)]
    rounds = [order[start : start + number] for start in range(0, len(order), number)]
    there_and_back = [each if turn % 2 == 0 else each[::-1] for turn, each in enumerate(rounds)]
    return [list(group) for group in zip(*there_and_back, strict=True)]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """The row numbers by length; rows of one length keep their order."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])
