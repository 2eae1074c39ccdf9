"""Prints the traceback of only the first process to fail; the others, which fail too or because of it, print one line.

Processes end as they would have ended. Only what they print differs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any

from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # which documents both
from torch.distributed.distributed_c10d import _get_default_store

_HEAD_START = 15
"""Seconds that a process which failed later waits, so that the launcher's agent sees the first one end first."""

_PATIENCE = timedelta(seconds=5)
"""Timeout for the store of the launcher's agent, which exists before this process."""

_runs = count()
"""Numbers the calls of [`one_traceback`]; all processes enter it together, so they agree on the number."""


def share_tracebacks() -> None:
    """Installs an excepthook with which only the first process to end with an exception prints its traceback.

    Does nothing in a launch of one process. May be called again: torch prefixes what an earlier hook prints.
    """
    if _world_size() > 1 and not isinstance(sys.excepthook, _Printer):
        sys.excepthook = _Printer(sys.excepthook)


@contextmanager
def one_traceback() -> Iterator[None]:
    """If an exception ends the program, only the first rank to raise one prints its traceback, even if another ends
    earlier.

    Every process must enter it, equally often.
    """
    run = next(_runs)
    try:
        yield
    except Exception as error:
        # Claimed when it is raised: a rank that fails because of this one may end before it.
        error.__dict__["_failed_first"] = _first_to_claim(f"trl_opsd/failed/{run}")
        raise


def ends_first(error: BaseException | None = None, silent: bool = True) -> bool:
    """Whether this process is the first of its launch to end because of an error, so that it should print it.

    If not, it has waited for the launcher to end it, and unless `silent` printed which rank failed first. Without a
    launcher's store, every process is the first.
    """
    first = _first_to_claim("trl_opsd/ended")
    first = getattr(error, "_failed_first", first)
    if first in (None, _rank()):
        return True
    if not silent:
        line = f"Rank {_rank()} ends with rank {first}, which failed first; see there. ({type(error).__name__})"
        print(line, file=sys.stderr, flush=True)
    time.sleep(_HEAD_START)  # the launcher's agent usually ends this process earlier
    return False


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else int(os.environ.get("RANK", 0))


def _world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def _first_to_claim(key: str) -> int | None:
    """The first rank to claim a key, possibly this one; `None` without other processes or without a store."""
    if _world_size() == 1:
        return None
    try:
        store = _store()
        return None if store is None else int(store.compare_set(key, "", str(_rank())))
    except RuntimeError:  # the process that hosts the store is gone
        return None


def _store() -> Any:
    """The store of torchrun's agent, which is there before the processes are connected, or else their own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=_PATIENCE)
        return PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return _get_default_store() if distributed.is_initialized() else None


class _Printer:
    """An excepthook that prints an exception as before in the first process to fail, and one line in the others."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if ends_first(error, silent=False):
            self._before(kind, error, traceback)
