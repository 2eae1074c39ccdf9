"""Rows that begin as they were recorded, and what follows from the student or from teachers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Complete = Callable[[list[list[int]]], list[list[int]]]
"""Completes prompts, as token ids."""


class Replay:
    """Generates in place of the student: each row begins as recorded, and its writer goes on.

    A turn that was recorded whole is returned as it is, so that tools and environments are called as they were then;
    where a record ends within a turn, or another state was reached, the turn is written from there.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],  # of the student
        recorded: Sequence[list[int]],  # with which each completion begins
        read: Sequence[list[int]],  # in place of the student's prompt, by whoever goes on with the row
        writers: Sequence[Complete],
        ends: Collection[int],
        most: int,  # tokens of a completion
    ) -> None:
        self._so_far: list[list[int]] = [[] for _ in prompts]
        """Of each row, what was returned, and what tools answered before that."""
        self._prompts, self._recorded, self._read = prompts, recorded, read
        self._writers, self._ends, self._most = writers, ends, most

    def complete(self, contexts: list[list[int]]) -> list[list[int]]:
        """A turn for each context: the prompts of all rows first, then those of some with the turns so far."""
        rows = self._rows_of(contexts)
        so_far = {row: list(ids[len(self._prompts[row]) :]) for row, ids in zip(rows, contexts, strict=True)}
        turns = {row: self._told(row, so_far[row]) for row in rows}
        unfinished = [row for row in rows if not turns[row] or turns[row][-1] not in self._ends]
        for writer in dict.fromkeys(self._writers[row] for row in unfinished):
            theirs = [row for row in unfinished if self._writers[row] == writer]
            written = writer([self._read[row] + so_far[row] + turns[row] for row in theirs])
            turns.update({row: turns[row] + ids for row, ids in zip(theirs, written, strict=True)})
        for row in rows:
            turns[row] = turns[row][: max(1, self._most - len(so_far[row]))]
            self._so_far[row] = so_far[row] + turns[row]
        return [turns[row] for row in rows]

    def _rows_of(self, contexts: Sequence[list[int]]) -> list[int]:
        """The row of each context: that of its place, or the one that has come so far."""
        if [*map(list, contexts)] == [*map(list, self._prompts)]:
            return list(range(len(contexts)))
        begun = [list(prompt) + so_far for prompt, so_far in zip(self._prompts, self._so_far, strict=True)]
        left = sorted(range(len(begun)), key=lambda row: -len(begun[row]))  # one may be the beginning of another
        found = []
        for context in contexts:
            found.append(next(row for row in left if list(context[: len(begun[row])]) == begun[row]))
            left.remove(found[-1])
        return found

    def _told(self, row: int, so_far: list[int]) -> list[int]:
        """What is recorded of the turn that follows; nothing where the row has come to another state."""
        recorded = self._recorded[row]
        told = recorded[len(so_far) :] if recorded[: len(so_far)] == so_far else []
        end = next((place for place, token in enumerate(told) if token in self._ends), len(told) - 1)
        return told[: end + 1]
