"""A thread that calls one function after the other: slow ones of several workers do not wait for each other."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeAlias
from weakref import finalize

from trl_opsd._compat.threads import start_thread

Wait: TypeAlias = Callable[[Any], Any]
"""Awaits what is awaitable; other values it returns."""

_Jobs: TypeAlias = "asyncio.Queue[tuple[Future[Any], Callable[[Wait], Any]] | None]"


class Worker:
    """A thread in which functions are called, and coroutines awaited in one event loop.

    What is bound to a thread or a loop, like a connection to SQLite or a WebSocket, may be kept between calls: the loop
    runs there, too, so that a session is kept alive.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: _Jobs = asyncio.Queue()
        start_thread("trl_opsd environment", _work, self._loop, self._jobs)
        finalize(self, self._loop.call_soon_threadsafe, self._jobs.put_nowait, None)

    def start(self, job: Callable[[Wait], Any]) -> Future[Any]:
        """Calls a job after those that were started before."""
        future: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._jobs.put_nowait, (future, job))
        return future


def _work(loop: asyncio.AbstractEventLoop, jobs: _Jobs) -> None:
    asyncio.set_event_loop(loop)  # where methods find it that await something themselves
    with asyncio.Runner(loop_factory=lambda: loop) as runner:

        def wait(value: Any) -> Any:
            return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

        while (job := runner.run(jobs.get())) is not None:
            future, call = job
            try:
                future.set_result(call(wait))
            except BaseException as error:  # also `SystemExit`: it is the caller's to handle
                future.set_exception(error)
            del job, future, call  # else they live until the next call


async def _awaited(value: Any) -> Any:
    return await value


class Late(Exception):
    """There is no result in time."""


def waited(futures: Sequence[Future[Any] | None], seconds: float | None) -> list[Any]:
    """The result or exception of each; [`Late`] for one that has none after so many seconds from now."""
    end = None if seconds is None else monotonic() + seconds
    found: list[Any] = []
    for future in futures:
        try:
            error = None if future is None else future.exception(end and max(0.0, end - monotonic()))
            found.append(None if future is None else error or future.result())
        except TimeoutError:
            found.append(Late(f"no answer within {seconds:g} seconds"))
    return found
