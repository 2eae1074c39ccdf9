"""The requests whose rows wait to be read, shared by the event loop and the reading thread; knows lengths only."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

Groups = Callable[[Sequence[int]], list[list[int]]]
"""Splits rows of these lengths into passes; the row numbers of each."""

_AHEAD = 512
"""Waiting rows that are looked at to fill a pass."""


class Full(Exception):
    """So many tokens wait that no more are accepted; the message has the numbers."""


class Closed(Exception):
    """The server ends and begins to read nothing more."""


@dataclass(eq=False, slots=True)
class Asked:
    """One request. It belongs to the event loop; only `unread` is changed by others, under the lock of [`Waiting`]."""

    rows: list[Tensor]
    """[L] each, token ids in host memory."""
    dtype: torch.dtype
    """What its states are rounded to."""
    answer: asyncio.Future[list[Tensor]]
    """[L, H] for each row, in host memory; or why there is none."""
    unread: dict[int, None] = field(init=False)
    """The rows that no pass has taken yet, in order."""
    states: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unread = dict.fromkeys(range(len(self.rows)))

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.rows))

    def put(self, row: int, states_LH: Tensor) -> None:
        """Takes the states of a row; the last one completes the answer."""
        self.states[row] = states_LH
        if len(self.states) == len(self.rows) and not self.answer.done():
            self.answer.set_result([self.states[one] for one in range(len(self.rows))])

    def fail(self, error: Exception) -> None:
        """Gives a reason instead of states."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Waiting:
    """Requests in the order in which they get their turns: one with further rows goes to the end after each.

    A pass has the first waiting row, so that none waits forever, and others that are read well together with it. Tokens
    of a request count from [`join`] to [`leave`], so also while its states wait to be sent.

    Args:
        groups (`Callable`):
            How rows are read together.
        most_tokens (`int`):
            Tokens that may be here at once.
        gather_seconds (`float`):
            How long an idle reader waits for more rows to come after the first.
    """

    def __init__(self, groups: Groups, most_tokens: int, gather_seconds: float) -> None:
        self._groups, self._most, self._gather = groups, most_tokens, gather_seconds
        self._requests: dict[Asked, None] = {}
        self._changed = threading.Condition()
        self._closed = False
        self.tokens = 0

    def join(self, asked: Asked) -> None:
        """Adds a request.

        Raises:
            Full: It would be more than `most_tokens`.
            Closed: No more are read.
        """
        with self._changed:
            if self._closed:
                raise Closed
            if self.tokens + asked.tokens > self._most:
                raise Full(
                    f"{self.tokens} tokens wait here, with the {asked.tokens} of this request it would be more than "
                    f"{self._most} (`--max-waiting-tokens`)"
                )
            self.tokens += asked.tokens
            self._requests[asked] = None
            self._changed.notify()

    def leave(self, asked: Asked) -> None:
        """Removes a request that joined: it was answered, or abandoned, and then is not read."""
        with self._changed:
            self.tokens -= asked.tokens
            self._requests.pop(asked, None)

    def passes(self) -> int:
        """Waits for rows, and returns how many passes those take that are waiting; 0 when closed."""
        while True:
            with self._changed:
                was_idle = not self._requests
                self._changed.wait_for(lambda: self._requests or self._closed)
            if was_idle:
                time.sleep(self._gather)
            if rows := self._first_rows():
                return len(self._groups([len(asked.rows[row]) for asked, row in rows]))
            if self._closed:
                return 0

    def take(self) -> list[tuple[Asked, int]]:
        """The rows of the next pass, each a request and a row number; empty if none wait."""
        while rows := self._first_rows():
            groups = self._groups([len(asked.rows[row]) for asked, row in rows])
            group = next(group for group in groups if 0 in group)
            with self._changed:
                taken = [rows[one] for one in sorted(group) if rows[one][0] in self._requests]
                for asked, row in taken:
                    del asked.unread[row]
                for asked in dict.fromkeys(asked for asked, _ in taken):
                    del self._requests[asked]
                    if asked.unread:
                        self._requests[asked] = None
            if taken:
                return taken
        return []

    def close(self) -> list[Asked]:
        """Accepts no more; returns the requests that have rows which nobody will read."""
        with self._changed:
            self._closed, left = True, list(self._requests)
            self._requests.clear()
            self._changed.notify()
        return left

    def _first_rows(self) -> list[tuple[Asked, int]]:
        with self._changed:
            return list(islice(((asked, row) for asked in self._requests for row in asked.unread), _AHEAD))
