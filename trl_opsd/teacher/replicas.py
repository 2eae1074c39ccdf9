"""Load balancing over the servers of one teacher: the least busy gets the next row, and one that fails is dropped.

Rows are sent again to another server, since scoring a row changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from trl_opsd.errors import ServerError
from trl_opsd.http.bounded_http import Background
from trl_opsd.teacher.answered_states import Expected, WrongStatesError, are_same, distance, served_dtype
from trl_opsd.teacher.replica import BREATH, BusyError, Facts, Replica, say

T = TypeVar("T")

_ROWS = 32
"""Maximum rows of one process in flight per server, which batches them."""
_FAILURES = 3
"""Consecutive failures after which a server is dropped; a connection may break once."""
_SECONDS = 10.0
"""After this, or four times the slowest row so far, a row is also sent to another server that has room."""
_ZEROED = 1e-6
"""Relative distance of the states of two tokens below which the weights must be zero, however small embeddings are."""
_PROBE_SECONDS = 30.0
"""Minimum deadline for a server's first two rows, which are short."""


class Replicas:
    """Clients of all servers of one teacher, which run in a background thread."""

    def __init__(self, urls: Sequence[str], deadline: float, timeout: float) -> None:
        # `deadline`: seconds per row over all attempts. `timeout`: seconds to wait for servers that are not up yet, and
        # again for their first rows.
        self._deadline, self._timeout = deadline, max(timeout, _PROBE_SECONDS)
        self._background = Background()
        self._live = [Replica(url, self._background) for url in urls]
        self._left_out: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._longest = 0.0
        self._background.run(_all([one.connect(timeout) for one in self._live]))
        self.facts: Facts = self._live[0].facts  # as the first server reports them
        self.context = min((one.facts.context for one in self._live if one.facts.context is not None), default=None)
        self._expected: Expected
        self.dtype: torch.dtype

    def prove(self, expected: Expected, vocabulary: int) -> Tensor:
        """Compares what the servers return for two short rows; returns the states of the first, [L, H], float32."""
        self._expected = expected
        # An id outside the vocabulary is not tried: where the tokenizer has more ids than the model, vLLM accepts it.
        spread = [place * (vocabulary - 1) // 7 for place in range(8)]  # up to the last id
        # The second row differs in its last token only, which no earlier state may depend on.
        rows = [spread, [*spread[:-1], spread[0]]]
        read = self._background.run(_all([self._read_each(one, rows) for one in self._live]))
        for replica, (one, other) in zip(self._live, read, strict=True):
            self._compare(replica, one, other, read[0][0])
        self.dtype = served_dtype(read[0][0])
        return read[0][0]

    async def _read_each(self, replica: Replica, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        until = monotonic() + self._timeout
        return await _all([self._read_first(replica, row, until) for row in rows])

    async def _read_first(self, replica: Replica, row: Sequence[int], until: float) -> Tensor:
        """A row from one server, which may be busy first, until a deadline."""
        while True:
            try:
                return await replica.states(row, self._expected, torch.float32, until - monotonic())
            except BusyError as error:
                if monotonic() + error.seconds >= until:
                    raise
                await asyncio.sleep(error.seconds)
            except ServerError as error:
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                raise ServerError(
                    f"The teacher's server at {replica.url} is up, but has not read a row of {len(row)} tokens within "
                    f"{self._timeout:g} seconds: see its log, and raise `teacher_server_timeout` if it only needs "
                    "longer."
                ) from error

    def _compare(self, replica: Replica, one: Tensor, other: Tensor, first: Tensor) -> None:
        if not are_same(one[:-1], other[:-1]):
            raise WrongStatesError(
                f"The teacher's server at {replica.url} returns states that depend on later tokens (they move by "
                f"{distance(one[:-1], other[:-1]):.2g} of their length): it reads in both directions, as models for "
                "embeddings do; serve the causal language model itself."
            )
        if distance(one[-1:], other[-1:]) < _ZEROED:
            raise WrongStatesError(
                f"The teacher's server at {replica.url} returns the same state for different tokens: its weights are "
                "zeroed or were not loaded; start it again."
            )
        if served_dtype(one) != served_dtype(first) or not are_same(one, first):
            raise WrongStatesError(
                f"The teacher's servers at {self._live[0].url} and {replica.url} return different states for the same "
                f"tokens, {distance(one, first):.2g} times their length apart, in {served_dtype(first)} and "
                f"{served_dtype(one)}: start all with one checkpoint, revision and `--dtype`."
            )

    def start(self, ids: Sequence[int]) -> Future[Tensor]:
        """Starts to score a row of L token ids; the future has its states, [L, H], or a `ServerError`."""
        return self._background.start(self._states(ids, monotonic() + self._deadline))

    async def _states(self, ids: Sequence[int], until: float) -> Tensor:
        try:
            async with asyncio.timeout(until - monotonic()):
                return await self._first_answer(ids)
        except TimeoutError:
            said = "\n".join(f"  {one.url}: {one.said or 'it has not answered'}" for one in self._live)
            raise ServerError(
                f"No server of the teacher has read a row of {len(ids)} tokens within {self._deadline:g} seconds, "
                "which follows from `ddp_timeout`: see their logs, and raise `ddp_timeout` if they only need longer.\n"
                f"{said}"
            ) from None

    async def _first_answer(self, ids: Sequence[int]) -> Tensor:
        """The first answer of any of the servers that got the row; a slow server makes another get it too."""
        asked: dict[asyncio.Task[Tensor], tuple[Replica, float]] = {}
        try:
            while True:
                replica = await self._least_busy(besides=[one for one, _ in asked.values()])
                if replica is not None:
                    replica.busy, replica.rows = replica.busy + len(ids), replica.rows + 1
                    asked[asyncio.create_task(self._ask(replica, ids))] = replica, monotonic()
                # After this time the loop sends the row to one more server, and takes the first answer.
                patience = max(_SECONDS, 4 * self._longest)
                done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    replica, began = asked.pop(task)
                    self._answered(replica, ids)
                    if isinstance(error := task.exception(), ServerError):
                        self._failed(replica, error, began)
                    elif replica in self._live:  # a dropped server's other answers may be wrong too
                        slow = ServerError(f"It was slow: after {patience:g} seconds another was faster.")
                        for other, (late, since) in asked.items():
                            if not other.done() and since < began:
                                self._failed(late, slow, since)
                        return task.result()
        finally:
            for task, (replica, _) in asked.items():
                task.cancel()
                self._answered(replica, ids)

    async def _least_busy(self, besides: Collection[Replica]) -> Replica | None:
        """A server with room, other than those; waits only if there are no others."""
        while self._live:
            # Taken before the search: an event set meanwhile must not be missed.
            changed, now = self._changed, monotonic()
            others = [one for one in self._live if one.rows < _ROWS and one not in besides]
            if room := [one for one in others if one.free_at <= now]:
                return min(room, key=lambda one: one.busy)
            if besides:
                return None
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min((one.free_at - now for one in others), default=None))
        if besides:
            return None
        reasons = "\n".join(f"  {url}: {why}" for url, why in self._left_out.items())
        raise ServerError(f"No server of the teacher is left, so that nothing more can be learned from it:\n{reasons}")

    async def _ask(self, replica: Replica, ids: Sequence[int]) -> Tensor:
        began = monotonic()
        states = await replica.states(ids, self._expected, self.dtype, self._deadline / _FAILURES)
        replica.failures, self._longest = 0, max(self._longest, monotonic() - began)
        return states

    def _answered(self, replica: Replica, ids: Sequence[int]) -> None:
        replica.busy, replica.rows = replica.busy - len(ids), replica.rows - 1
        self._notify()

    def _failed(self, replica: Replica, error: ServerError, began: float) -> None:
        """Pauses a server, and drops it if its answer is wrong or it failed several times. To be busy is no failure."""
        replica.said, replica.free_at = str(error), monotonic() + BREATH
        if isinstance(error, BusyError):
            replica.free_at = monotonic() + error.seconds
        elif began >= replica.failed_at:  # requests in flight at a failure fail with it, and count once
            replica.failures, replica.failed_at = replica.failures + 1, monotonic()
        hopeless = isinstance(error, WrongStatesError) or replica.failures >= _FAILURES
        if replica in self._live and hopeless:
            self._live.remove(replica)
            self._left_out[replica.url] = str(error)
            if self._live:
                left = ", ".join(one.url for one in self._live)
                say(f"The teacher's server at {replica.url} is asked no more; {left} read its rows. {error}")
            self._notify()

    def _notify(self) -> None:
        # A new event each time, so that waiters wake once per change.
        self._changed.set()
        self._changed = asyncio.Event()


async def _all(coroutines: Sequence[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*coroutines)
