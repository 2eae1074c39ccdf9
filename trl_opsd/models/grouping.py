"""Groups rows into forward passes with little padding, by their lengths and the memory that a token takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import whole_shape

Fits = Callable[[int, int], bool]
"""`fits(tokens, width)`: whether a pass may have so many tokens, padding included, in rows of that width."""


def fewest_groups(lengths: Sequence[int], fits: Fits, packed: bool = False) -> list[list[int]]:
    """Row numbers of as few groups as fit, longest rows first; a row that does not fit is a group by itself."""
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
    """Row numbers of the padded groups with the lowest total cost, then with the fewest groups."""
    order = longest_first(lengths)
    # Dynamic programming over the sorted rows. For each number of rows: cost and number of their groups, and where the
    # last group begins, negated so that ties prefer a small last group.
    best: list[tuple[float, int, int]] = [(0, 0, 0)]
    for end in range(1, len(order) + 1):
        found = (math.inf, end + 1, -end)
        for begin in range(end - 1, -1, -1):
            width = lengths[order[begin]]
            tokens = width * (end - begin)
            # A row that does not fit is a group by itself.
            if begin < end - 1 and not fits(tokens, width):  # then no larger group fits either
                break
            # A group costs its tokens, but at least `least`, below which a pass gets no faster.
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
    """Row numbers of exactly `number` groups, none empty, whose largest has as few tokens as possible."""

    def within(most: int) -> list[list[int]]:
        return fewest_groups(lengths, lambda tokens, *_: tokens <= most, packed)

    # Bisects the size of the largest group; then splits groups, as too few may have resulted.
    below, enough = 0, len(lengths) * max(lengths)
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (middle, enough) if len(within(middle)) > number else (below, middle)
    groups = within(enough)
    # The number is fixed, as processes make equally many passes: halve the largest.
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
    # Dealt back and forth, so that no group always gets the longest row of a round.
    rounds = [order[start : start + number] for start in range(0, len(order), number)]
    there_and_back = [each if turn % 2 == 0 else each[::-1] for turn, each in enumerate(rounds)]
    return [list(group) for group in zip(*there_and_back, strict=True)]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """The row numbers, longest first; rows of equal length keep their order."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def bytes_per_token(model: CausalLM) -> tuple[int, int]:
    """Bytes of the activations of a token, and more for each token of its row, estimated from the config alone."""
    # At once live ten vectors of the hidden width (residuals, norms in float32, attention), three of the inner width,
    # and a byte of mask for each token of the row; eager attention also keeps its scores, twice in float32.
    config = model.config.get_text_config()
    hidden = _largest(config, "hidden_size") or whole_shape(model.get_output_embeddings().weight)[1]
    inner = _largest(config, "intermediate_size") or _largest(config, "n_inner") or 4 * hidden
    heads = _largest(config, "num_attention_heads")
    per_pair = max(8 * heads, 1) if config._attn_implementation == "eager" else 1
    return int(model.dtype.itemsize * (10 * hidden + 3 * inner)), per_pair


def _largest(config: Any, name: str) -> int:
    """A size from the config, 0 if missing, the largest if stated per layer."""
    stated = getattr(config, name, None) or 0
    return max(stated) if isinstance(stated, list | tuple) else int(stated)
