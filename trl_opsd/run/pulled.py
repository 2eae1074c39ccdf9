"""Takes from an iterator in a thread of its own, so that what has come can be had without waiting for what has not."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Generic, TypeVar

T = TypeVar("T")


class Endable(Iterator[T]):
    """What a generator yields. Any thread may close it, also while another waits for the next.

    Args:
        items (`Generator`):
            Takes from a source that waits.
        end (`Callable`, *optional*):
            Ends that wait; may be called by any thread.
    """

    def __init__(self, items: Generator[T, None, None], end: Callable[[], None] | None) -> None:
        self._items, self._end = items, end

    def __next__(self) -> T:
        return next(self._items)

    def close(self) -> None:
        """Gives up what has not come."""
        if self._end is not None:
            _unless_it_runs(self._end)
        _unless_it_runs(self._items.close)


def _unless_it_runs(close: Callable[[], None]) -> None:
    """Closes a generator, which nobody can while another thread is in it; then it is closed when that leaves it."""
    try:
        close()
    except ValueError as error:
        if str(error) != "generator already executing":
            raise


class Pulled(Generic[T]):
    """The items of an iterator, in the order in which they come.

    Args:
        items (`Iterator`):
            Waits for another process or machine.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._came: SimpleQueue[T | BaseException] = SimpleQueue()
        self._unwanted = Event()
        self.last = perf_counter()
        """When the newest item came, by `time.perf_counter`."""
        Thread(target=self._pull, name="trl_opsd rows", daemon=True).start()

    def take(self, wait: bool) -> list[T]:
        """All items that have come and were not taken yet.

        Args:
            wait (`bool`):
                Wait for one if there is none.

        Raises:
            BaseException: What the iterator raised; `StopIteration` if it has ended and this would wait.
        """
        taken: list[T] = []
        with suppress(Empty):
            while True:
                one = self._came.get(block=wait and not taken)
                if isinstance(one, BaseException):
                    self._came.put(one)  # it comes after all items
                    if (wait and not taken) or not isinstance(one, StopIteration):
                        raise one
                    break
                taken.append(one)
        return taken

    def close(self) -> None:
        """Closes the iterator: at once if it is [`Endable`], else when it yields next, if `next` waits."""
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
