"""Prints the traceback of only the first process to fail; the others, which fail because of it, print one line.

Processes end as they would have ended. Only what they print differs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import Any

from torch import distributed

_HEAD_START = 15
"""Seconds that a process which failed later waits, so that the launcher's agent sees the first one end first."""

_runs = count()
"""Numbers the calls of [`one_traceback`]; all processes enter it together, so they agree on the number."""


@contextmanager
def one_traceback() -> Iterator[None]:
    """If an exception inside ends the program, only the first rank to fail prints its traceback.

    Every process must enter it, equally often.
    """
    run = next(_runs)
    try:
        yield
    except Exception as error:
        first = _first_to_fail(f"trl_opsd/failed/{run}")
        if first is not None and first != distributed.get_rank():
            _shorten(error, f"Rank {distributed.get_rank()} ends with rank {first}, which failed first; see there.")
        raise


def _first_to_fail(key: str) -> int | None:
    """The first rank to report a failure, possibly this one; `None` without other processes or without the store."""
    if not (distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        return int(store.compare_set(key, "", str(distributed.get_rank())))
    except RuntimeError:  # the process that hosts the store is gone
        return None


def _shorten(error: Exception, line: str) -> None:
    """Makes the excepthook print one line for an exception."""
    error.__dict__["_printed_as"] = line
    if not isinstance(sys.excepthook, _Printer):
        sys.excepthook = _Printer(sys.excepthook)


class _Printer:
    """An excepthook that prints the line set by [`_shorten`], and any other exception as before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        line = getattr(error, "_printed_as", None)
        if line is None:
            self._before(kind, error, traceback)
        else:
            print(f"{line} ({kind.__name__})", file=sys.stderr, flush=True)
            time.sleep(_HEAD_START)  # the launcher's agent usually ends this process earlier
