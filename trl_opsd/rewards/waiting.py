"""Runs coroutines in a thread with an event loop of its own, which stays: their clients belong to one loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar, final

__all__ = ["EventLoop"]

T = TypeVar("T")


@final
class EventLoop:
    """An event loop that begins with the first coroutine, and ends with this object.

    The caller's own thread may have a running loop, as in a notebook, where no other can be run.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns; waits for it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_forever, args=(self._loop,), name="rewards", daemon=True).start()
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: what still waits is given up
            raise


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
