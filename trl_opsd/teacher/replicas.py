"""Several servers of one teacher: the least busy is asked first, and one that fails is left out.

Rows are asked again elsewhere, since reading a row changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

import torch
from torch import Tensor

from trl_opsd.run.bounded_http import Background
from trl_opsd.run.errors import ServerError
from trl_opsd.teacher.answered_states import Expected, WrongStatesError, are_same, distance, served_dtype
from trl_opsd.teacher.replica import BREATH, Facts, Replica, say

T = TypeVar("T")

_ROWS = 32
"""Rows that one process has a server read at once; it batches them."""
_FAILURES = 3
"""Failures in a row after which a server is left out; a connection may break once."""
_SECONDS = 10.0
"""After this, or four times what the slowest row has taken, a row is asked for elsewhere too, if there is room."""


class Replicas:
    """Clients of all servers of one teacher, in a thread of their own.

    Args:
        urls (`Sequence[str]`):
            Their addresses.
        deadline (`float`):
            Seconds within which a row has to be answered, over all attempts.
        timeout (`float`):
            Seconds to wait for servers that are not up yet.

    Attributes:
        facts ([`~teacher.replica.Facts`]): what the first server says about itself.
        context (`int` or `None`): most tokens of a request to any of them.

    Raises:
        ValueError: One is not up in time.
        ServerError: One is no server for a teacher.
    """

    def __init__(self, urls: Sequence[str], deadline: float, timeout: float) -> None:
        self._background = Background()
        self._live = [Replica(url, deadline / len(urls), self._background) for url in urls]
        self._left_out: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._longest = 0.0
        self._background.run(_all([one.connect(timeout) for one in self._live]))
        self.facts: Facts = self._live[0].facts
        self.context = min((one.facts.context for one in self._live if one.facts.context is not None), default=None)
        self._expected: Expected
        self.dtype: torch.dtype

    def prove(self, expected: Expected, vocabulary: int) -> None:
        """Has every server read two short rows, and compares what they say.

        An id that the vocabulary lacks is not tried: where the tokenizer has more ids than the model, vLLM accepts it.

        Args:
            expected ([`~teacher.answered_states.Expected`]):
                What is known of the states.
            vocabulary (`int`):
                Size of the teacher's.

        Raises:
            ServerError: A server does not return the teacher's states, or two differ.
        """
        self._expected = expected
        spread = [place * (vocabulary - 1) // 7 for place in range(8)]  # up to the last id
        rows = [spread, [*spread[:-1], spread[0]]]
        read = self._background.run(_all([self._read_each(one, rows) for one in self._live]))
        for replica, (one, other) in zip(self._live, read, strict=True):
            self._compare(replica, one, other, read[0][0])
        self.dtype = served_dtype(read[0][0])

    async def _read_each(self, replica: Replica, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        return await _all([replica.states(row, self._expected, torch.float32) for row in rows])

    def _compare(self, replica: Replica, one: Tensor, other: Tensor, first: Tensor) -> None:
        if not are_same(one[:-1], other[:-1]):
            raise WrongStatesError(
                f"The teacher's server at {replica.url} returns states that depend on later tokens (they move by "
                f"{distance(one[:-1], other[:-1]):.2g} of their length): it reads in both directions, as models for "
                "embeddings do; serve the causal language model itself."
            )
        if are_same(one[-1:], other[-1:]):
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
        """Starts to read a row of L token ids; the result is its states, [L, H].

        It raises a `ServerError` if no server is left.
        """
        return self._background.start(self._states(ids))

    async def _states(self, ids: Sequence[int]) -> Tensor:
        asked: dict[asyncio.Task[Tensor], tuple[Replica, float]] = {}
        try:
            while True:
                replica = await self._least_busy(besides=[one for one, _ in asked.values()])
                if replica is not None:
                    replica.busy, replica.rows = replica.busy + len(ids), replica.rows + 1
                    asked[asyncio.create_task(self._ask(replica, ids))] = replica, monotonic()
                patience = max(_SECONDS, 4 * self._longest)
                done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    replica, began = asked.pop(task)
                    self._answered(replica, ids)
                    if isinstance(error := task.exception(), ServerError):
                        self._failed(replica, error, began)
                    elif replica in self._live:  # else its other answers are wrong
                        for other, (late, since) in asked.items():
                            if not other.done() and since < began:
                                slow = ServerError(f"It was slow: after {patience:g} seconds another was faster.")
                                self._failed(late, slow, monotonic())
                        return task.result()
                if done and not asked:
                    await asyncio.sleep(BREATH)  # what has broken off may be about to start again
        finally:
            for task, (replica, _) in asked.items():
                task.cancel()
                self._answered(replica, ids)

    async def _least_busy(self, besides: Collection[Replica]) -> Replica | None:
        """A server with room, other than those; waits for it only if there are none."""
        while self._live:
            changed = self._changed
            if room := [one for one in self._live if one.rows < _ROWS and one not in besides]:
                return min(room, key=lambda one: one.busy)
            if besides:
                return None
            await changed.wait()
        if besides:
            return None
        reasons = "\n".join(f"  {url}: {why}" for url, why in self._left_out.items())
        raise ServerError(f"No server of the teacher is left, so that nothing more can be learned from it:\n{reasons}")

    async def _ask(self, replica: Replica, ids: Sequence[int]) -> Tensor:
        began = monotonic()
        states = await replica.states(ids, self._expected, self.dtype)
        replica.failures, self._longest = 0, max(self._longest, monotonic() - began)
        return states

    def _answered(self, replica: Replica, ids: Sequence[int]) -> None:
        replica.busy, replica.rows = replica.busy - len(ids), replica.rows - 1
        self._notify()

    def _failed(self, replica: Replica, error: ServerError, began: float) -> None:
        """Leaves a server out that answers wrongly or not in time, or has failed several times.

        Requests that were under way when it failed have failed with it, and are not counted again.
        """
        if began >= replica.failed_at:
            replica.failures, replica.failed_at = replica.failures + 1, monotonic()
        hopeless = isinstance(error, WrongStatesError) or isinstance(error.__cause__, TimeoutError)
        if replica in self._live and (hopeless or replica.failures >= _FAILURES):
            self._live.remove(replica)
            self._left_out[replica.url] = str(error)
            if self._live:
                left = ", ".join(one.url for one in self._live)
                say(f"The teacher's server at {replica.url} is asked no more; {left} read its rows. {error}")
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _all(coroutines: Sequence[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*coroutines)
