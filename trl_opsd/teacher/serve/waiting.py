"""The queue of requests, shared by the event loop and the reading thread; knows lengths only."""

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
"""Splits rows of these lengths into passes, each a list of row numbers."""

_AHEAD = 512
"""Maximum waiting rows considered for a pass."""


class Full(Exception):
    """Too many tokens wait for another request to be accepted; the message has the numbers."""


class Closed(Exception):
    """The server ends and starts no more rows."""


@dataclass(eq=False, slots=True)
class Asked:
    """One request. It belongs to the event loop; only `unread` is changed elsewhere, under the lock of [`Waiting`]."""

    rows: list[Tensor]
    """[L] each, token ids in host memory."""
    dtype: torch.dtype
    """The dtype that its states are rounded to."""
    answer: asyncio.Future[list[Tensor]]
    """[L, H] for each row, in host memory; or an exception."""
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
        """Stores the states of a row; the last one completes the answer."""
        self.states[row] = states_LH
        if len(self.states) == len(self.rows) and not self.answer.done():
            self.answer.set_result([self.states[one] for one in range(len(self.rows))])

    def fail(self, error: Exception) -> None:
        """Completes the answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Waiting:
    """Requests in round-robin order: one with further rows moves to the end after each pass."""

    def __init__(self, groups: Groups, most_tokens: int, gather_seconds: float) -> None:
        self._groups, self._most, self._gather = groups, most_tokens, gather_seconds
        self._requests: dict[Asked, None] = {}
        self._changed = threading.Condition()
        self._closed = False
        self.tokens = 0  # of requests from `join` to `leave`, so also while their states wait to be sent

    def join(self, asked: Asked) -> None:
        """Adds a request; raises `Full` if it would exceed the limit of tokens, `Closed` if the server ends."""
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
        """Removes a request that joined: it was answered, or abandoned and need not be scored."""
        with self._changed:
            self.tokens -= asked.tokens
            self._requests.pop(asked, None)

    def passes(self) -> int:
        """Waits for rows, and returns the number of passes that the waiting ones take; 0 when closed."""
        while True:
            with self._changed:
                # After idling, more rows are likely to arrive together: they should share the first pass.
                was_idle = not self._requests
                self._changed.wait_for(lambda: self._requests or self._closed)
            if was_idle:
                time.sleep(self._gather)
            if rows := self._first_rows():
                return len(self._groups([len(asked.rows[row]) for asked, row in rows]))
            if self._closed:
                return 0

    def take(self) -> list[tuple[Asked, int]]:
        """The rows of the next pass, as request and row number; empty if none wait."""
        while rows := self._first_rows():
            groups = self._groups([len(asked.rows[row]) for asked, row in rows])
            # The pass of the first waiting row, so that none waits forever, with others that fit well beside it.
            group = next(group for group in groups if 0 in group)
            with self._changed:
                # A request may have been abandoned since its rows were listed.
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
        """Accepts no more requests; returns those with rows that will not be scored."""
        with self._changed:
            self._closed, left = True, list(self._requests)
            self._requests.clear()
            self._changed.notify()
        return left

    def _first_rows(self) -> list[tuple[Asked, int]]:
        with self._changed:
            return list(islice(((asked, row) for asked in self._requests for row in asked.unread), _AHEAD))
