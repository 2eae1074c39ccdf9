"""Runs coroutines in a thread with its own event loop, which stays, as HTTP clients are bound to one loop."""

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
    """An event loop that starts with the first coroutine, and stops with this object."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine and returns its result."""
        if self._loop is None:
            # In its own thread, as the caller's may have a running loop, as in a notebook, where no other can be run.
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_forever, args=(self._loop,), name="rewards", daemon=True).start()
            # The thread does not hold this object, so it can be collected.
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C nothing awaits it
            raise


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
