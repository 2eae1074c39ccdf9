"""The queue of requests, and the thread that owns the model and scores the waiting rows in as few passes as fit.

L tokens of a row · H hidden width
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import hidden_states
from trl_opsd.models.padding import Reading
from trl_opsd.teacher.frozen import FrozenTeacher, Resident, pass_groups

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
                    f"{self.tokens} tokens are queued; with the {asked.tokens} of this request they would exceed "
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


logger = logging.getLogger(__name__)

_GATHER_SECONDS = {True: 0.005, False: 0.1}
"""How long an idle reader waits for more rows, by whether its weights stay on the device: offloaded weights should not
be copied for the first row alone."""


class NoStates(Exception):
    """There are no states to answer with; the message has the reason."""


def row_states(model: CausalLM, rows: Sequence[Tensor], reading: Reading) -> list[Tensor]:
    """The last hidden state at every token of each row, [L, H] each, as each row alone would have them."""
    lengths = [len(row) for row in rows]
    if reading.packed:
        places = torch.cat([torch.arange(length, device=rows[0].device) for length in lengths])
        return list(hidden_states(model, torch.cat(list(rows))[None], None, places[None])[0].split(lengths))
    found: dict[int, Tensor] = {}
    for group in reading.groups(lengths, collective=False):
        ids = pad_sequence([rows[row] for row in group], batch_first=True)
        mask = pad_sequence([torch.ones_like(rows[row]) for row in group], batch_first=True)
        for row, states in zip(group, hidden_states(model, ids, mask), strict=True):
            found[row] = states[: lengths[row]]
    return [found[row] for row in range(len(rows))]


@dataclass(slots=True)
class Counts:
    """What was scored since the start; updated by the reading thread."""

    rows: int = 0
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of its passes; 0 before the first."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Reader(threading.Thread):
    """Scores until the queue of requests is closed; nothing else may use the teacher's model."""

    def __init__(self, teacher: FrozenTeacher, most_tokens: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="trl_opsd teacher", daemon=True)
        self._teacher, self._loop = teacher, loop  # futures and requests belong to the thread of this event loop
        placement = teacher.placement
        groups = partial(
            pass_groups, teacher.model, device=placement.device, reading=teacher.reading, few=placement.passes_cost
        )
        self.waiting = Waiting(groups, most_tokens, _GATHER_SECONDS[isinstance(placement, Resident)])
        self.counts = Counts()
        self.failure: str | None = None  # of the latest pass, until another succeeds; not of one that ran out of memory

    def run(self) -> None:
        while passes := self.waiting.passes():
            taken: list[tuple[Asked, int]] = []
            try:
                # Offloaded weights come to the device once for all passes that wait.
                with torch.no_grad(), self._teacher.placement.reading(passes) as run:
                    for _ in range(passes):
                        # Requests may have been abandoned, so there can be fewer passes than counted.
                        if not (taken := self.waiting.take()):
                            break
                        self._read(run, taken)
            except Exception as error:  # one request must neither end the server nor leave others unanswered
                self._fail(taken or self.waiting.take(), error)

    def _read(self, run: Any, taken: Sequence[tuple[Asked, int]]) -> None:
        begun, device = monotonic(), self._teacher.placement.device
        rows = [asked.rows[row].to(device) for asked, row in taken]
        read = run(row_states, rows, self._teacher.reading)
        found = [_on_host(states, asked.dtype) for (asked, _), states in zip(taken, read, strict=True)]
        self.failure = None
        self.counts.rows += len(rows)
        self.counts.tokens += sum(map(len, rows))
        self.counts.passes += 1
        self.counts.seconds += monotonic() - begun
        for (asked, row), states in zip(taken, found, strict=True):
            if states is None:
                dtype = str(asked.dtype).removeprefix("torch.")
                error = NoStates(f"The teacher's states of row {row} are not finite in {dtype}")
                self._loop.call_soon_threadsafe(asked.fail, error)
            else:
                self._loop.call_soon_threadsafe(asked.put, row, states)

    def _fail(self, taken: Sequence[tuple[Asked, int]], error: Exception) -> None:
        longest = max((len(asked.rows[row]) for asked, row in taken), default=0)
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
        if not isinstance(error, torch.OutOfMemoryError):  # a smaller pass may fit
            self.failure = why
        logger.error(f"A forward pass over {len(taken)} rows of up to {longest} tokens failed.", exc_info=error)
        for asked, _ in taken:
            self._loop.call_soon_threadsafe(asked.fail, NoStates(f"The teacher failed on this request, {why}"))


def _on_host(states_LH: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A copy of states in host memory in this dtype; `None` where it is not finite."""
    rounded = states_LH.to(dtype)
    return rounded.to("cpu", copy=True) if rounded.isfinite().all() else None
