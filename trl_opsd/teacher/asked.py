"""Rows of a generation batch that servers score: each once, some ahead, and answers as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from torch import Tensor
from tqdm import tqdm

from trl_opsd.types import Rollout

Row = TypeVar("Row", bound=Hashable)

_EXPECTED_BYTES = 4_000_000_000
"""Byte limit for answers to rows that were requested ahead; others are requested when their targets are needed."""


class Asked(Generic[Row]):
    """Requests by row, from `start`; `size_of` a row are the tokens that it has, and `width` the bytes for each."""

    def __init__(self, start: Callable[[Row], Future[Tensor]], size_of: Callable[[Row], int], width: int) -> None:
        self._start, self._size_of, self._width = start, size_of, width
        self._expected: dict[Row, Future[Tensor]] = {}
        self._alone: tuple[Row, Future[Tensor]] | None = None

    def expect(self, rows: Iterable[Row | None]) -> None:
        """Requests rows ahead."""
        kept = sum(map(self._size_of, self._expected)) * self._width
        for row in rows:
            if row is None or row in self._expected:
                continue
            kept += self._size_of(row) * self._width
            if kept > _EXPECTED_BYTES:  # the rest is requested when it is needed
                return
            self._expected[row] = self._start(row)

    def forget(self) -> None:
        """Drops what was requested ahead."""
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()

    def answers(self, rows: Sequence[Row | None], progress: bool) -> Generator[Tensor | None]:
        """The answer to each row, in order; `None` where there is no row. Close it, so that none is left over."""
        # Equal completions of one prompt give equal rows, which are requested once; the longest should not start last.
        asked = sorted({row for row in rows if row is not None}, key=lambda row: -self._size_of(row))
        reading = {row: self._begun(row) for row in asked}
        # With `overlap="step"`, a process that waits for others requests one row again and again: keep its answer.
        self._alone = next(iter(reading.items())) if len(rows) == len(reading) == 1 else None
        last: dict[Any, int] = {row: number for number, row in enumerate(rows)}
        try:
            bar = tqdm(rows, desc="teach", unit="row", delay=5, leave=False, disable=not progress)
            for number, row in enumerate(bar):
                yield None if row is None else reading[row].result()
                if row is not None and last[row] == number:
                    del reading[row]  # otherwise all answers of a batch would be held twice
        finally:
            for future in reading.values():
                future.cancel()

    def _begun(self, row: Row) -> Future[Tensor]:
        """The answer to a row that was requested ahead, or was the last single row; else the row is requested now."""
        found = self._expected.pop(row, None)
        if found is None and self._alone is not None and self._alone[0] == row:
            found = self._alone[1]
        # A request that failed since then, perhaps in an earlier training, is repeated.
        if found is not None and not (found.done() and (found.cancelled() or found.exception())):
            return found
        return self._start(row)


def rows_of(
    rollout: Rollout, vocabulary: int, row_of: Callable[[int, list[int], list[int], list[int]], Any]
) -> list[Any]:
    """What is asked of each row, from its number, prompt, completion and places that count; `None` without these."""
    found: list[Any] = []
    lists = zip(rollout.prompt_lists(), rollout.completion_lists(), rollout.counts.cpu(), strict=True)
    for number, (prompt, completion, counts_C) in enumerate(lists):
        places = counts_C.nonzero().flatten().tolist()
        found.append(row := row_of(number, prompt, completion, places) if places else None)
        if row is not None and max(row.ids) >= vocabulary:  # vLLM would use a row of its padded embeddings
            raise ValueError(
                f"A row has the token id {max(row.ids)}, but the teacher's vocabulary has {vocabulary}: was another "
                "tokenizer used? Nothing of this batch was sent."
            )
    return found
