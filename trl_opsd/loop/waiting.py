"""Chooses rows of the next micro-batch while others are being generated; knows lengths and arrival only."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Waiting"]


class Waiting:
    """The rows of a step that have come, and of these the ones that no micro-batch has taken yet.

    A micro-batch has `rows` rows or, with a `budget`, as many tokens at most, padding included (a longer row is alone);
    `packed` rows are not padded; `in_order` makes micro-batches independent of the order of arrival.
    """

    def __init__(
        self, prompts: Sequence[int], *, rows: int, budget: int | None, packed: bool, multiple: int, in_order: bool
    ) -> None:
        self._prompts, self._rows, self._budget = prompts, rows, budget
        self._packed, self._multiple, self._in_order = packed, multiple, in_order
        self._came: list[int] = []
        self.completions: dict[int, list[int]] = {}
        """By the number of the row."""
        self.left = len(prompts)
        """Rows that no micro-batch has taken yet."""

    def add(self, row: int, completion: list[int]) -> None:
        """Adds a row that has come."""
        self.completions[row] = completion
        self._came.append(row)

    def take(self) -> list[int] | None:
        """The rows of the next micro-batch; `None` if another row has to come first, empty if all were taken."""
        ready = self._came
        if self._in_order:
            first = len(self._prompts) - self.left
            ready = sorted(ready)  # of these only the rows that follow the last taken without a gap
            ready = [row for place, row in enumerate(ready, start=first) if row == place]
        group: list[int] = []
        for row in ready:
            if group and not self._fit([*group, row]):
                break
            group.append(row)
        is_full = len(group) < len(ready) or (self._budget is None and len(group) == self._rows)
        # With a budget rows are taken as they come: waiting for a full one would leave the device idle.
        takes_what_there_is = self._budget is not None and not self._in_order and bool(group)
        if not (is_full or takes_what_there_is or len(ready) == self.left):
            return None
        self._came = [row for row in self._came if row not in group]
        self.left -= len(group)
        return group

    def shortest(self) -> int:
        """The number of the shortest row that has come."""
        return min(self.completions, key=self._length)

    def _fit(self, rows: list[int]) -> bool:
        if self._budget is None:
            return len(rows) <= self._rows
        lengths = [-(-self._length(row) // self._multiple) * self._multiple for row in rows]
        return (sum(lengths) if self._packed else max(lengths) * len(lengths)) <= self._budget

    def _length(self, row: int) -> int:
        return self._prompts[row] + len(self.completions[row])
