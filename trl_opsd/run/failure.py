"""Lets the process that failed first tell why; the others, which fail because it is gone, say no more than that.

Whoever fails ends as it would have ended. Only what is printed about it differs.
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
"""Seconds a process that failed later stays, so that the agent that started them all sees the first one end first."""

_runs = count()
"""How often it was entered: all processes enter together, so they agree about the number."""


@contextmanager
def one_traceback() -> Iterator[None]:
    """An exception that leaves this and then the program is printed in full by the first process to fail.

    Every process has to enter it, equally often.
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
    """The rank that said first that it failed, maybe this one; `None` where there is nobody to ask."""
    if not (distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    try:
        store = distributed.distributed_c10d._get_default_store()
        return int(store.compare_set(key, "", str(distributed.get_rank())))
    except RuntimeError:  # the process that kept the store is gone
        return None


def _shorten(error: Exception, line: str) -> None:
    """Has an exception printed as one line, should it end the program."""
    error.__dict__["_said_instead"] = line
    if not isinstance(sys.excepthook, _Printer):
        sys.excepthook = _Printer(sys.excepthook)


class _Printer:
    """Prints what [`_shorten`] wrote, and any other exception as before."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        line = getattr(error, "_said_instead", None)
        if line is None:
            self._before(kind, error, traceback)
        else:
            print(f"{line} ({kind.__name__})", file=sys.stderr, flush=True)
            time.sleep(_HEAD_START)  # an agent ends it before that
