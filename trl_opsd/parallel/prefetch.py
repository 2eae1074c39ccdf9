"""Prefetches from an iterator in a thread, so that items that have come can be taken without waiting for others."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event
from time import perf_counter
from typing import Generic, TypeVar

from trl_opsd._compat.threads import start_thread

T = TypeVar("T")


class Closable(Iterator[T]):
    """A generator's items. Any thread may close it, also while another waits for the next: `end` ends that wait."""

    def __init__(self, items: Generator[T, None, None], end: Callable[[], None] | None) -> None:
        self._items, self._end = items, end

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """Cancels what has not come."""
        for close in filter(None, (self._end, self._items.close)):
            _unless_it_runs(close)


def _unless_it_runs(close: Callable[[], None]) -> None:
    """Closes a generator; while another thread is in it that is impossible, and it is closed when that leaves it."""
    try:
        close()
    except ValueError as error:
        if str(error) != "generator already executing":
            raise


class Prefetcher(Generic[T]):
    """Items of an iterator that waits for another process or machine, in the order in which they come."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._came: SimpleQueue[T | BaseException] = SimpleQueue()
        self._unwanted = Event()
        self.last = perf_counter()
        """Time of the newest item, by `time.perf_counter`."""
        start_thread("trl_opsd rows", self._pull)

    def take(self, wait: bool) -> list[T]:
        """All items that came and were not taken, after a `wait` for one if there is none; raises as the iterator."""
        taken: list[T] = []
        with suppress(Empty):
            while True:
                one = self._came.get(block=wait and not taken)
                if isinstance(one, BaseException):
                    self._came.put(one)  # for the next call: it comes after all items
                    # The end of the iterator is `StopIteration`, and only for a call that would have to wait.
                    if (wait and not taken) or not isinstance(one, StopIteration):
                        raise one
                    break
                taken.append(one)
        return taken

    def close(self) -> None:
        """Closes the iterator: at once if it is [`Closable`], else at its next item."""
        self._unwanted.set()
        if hasattr(self._items, "close"):
            _unless_it_runs(self._items.close)

    def _pull(self) -> None:
        end: BaseException = StopIteration()
        try:
            for item in self._items:
                if self._unwanted.is_set():
                    break
                self.last = perf_counter()
                self._came.put(item)
        except BaseException as error:  # raised where items are taken
            end = error
        finally:
            if hasattr(self._items, "close"):
                self._items.close()
            self._came.put(end)
