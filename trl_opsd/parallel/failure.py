"""How several processes fail: one traceback, timeouts of collectives, and the stacks of a phase that hangs.

Processes end as they would have ended. Only what they print differs.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from threading import Timer
from types import TracebackType
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore, constants  # type: ignore[attr-defined]  # which documents both
from torch.distributed import distributed_c10d as c10d
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
        line = f"Rank {_rank()} ends because rank {first} failed first; see its error. ({type(error).__name__})"
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


def set_group_timeout(time: timedelta) -> None:
    """Sets the timeout of later collectives in all process groups of this process that still have torch's default.

    transformers passes `ddp_timeout` to the first group, but not on a CPU. A group that a library creates later, such
    as DeepSpeed's, has torch's default: 10 minutes with NCCL, less than a rollout may take, and 30 with gloo.
    """
    for group in c10d._world.pg_map:  # torch has no public list of all groups
        for backend in _backends(group):
            if backend.options._timeout in (constants.default_pg_timeout, constants.default_pg_nccl_timeout):
                backend._set_default_timeout(time)


def _backends(group: Any) -> list[Any]:
    """The backends of a group, one for each device type, whose timeout can be set."""
    found = [group._get_backend(torch.device(device)) for device in {one.type for one in group._device_types}]
    return [one for one in found if hasattr(one, "_set_default_timeout")]


_STACKS_DELAY = 0.3
"""Seconds between the line that names the phase and the stacks, so that they are printed in this order."""

_STDERR = 2
"""A file descriptor, which a notebook's `sys.stderr` lacks; writing to it needs no Python lock."""


class Watchdog:
    """Reports phases that exceed `seconds`, excluding phases nested inside them.

    The stacks are printed by a thread that does not need the GIL, so they appear even if a library hangs while holding
    it; only the line that names the phase is missing then.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._phases: list[str] = []
        self._notice: Timer | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Watches the body as the phase of this name."""
        self._phases.append(phase)
        self._watch()
        try:
            yield
        finally:
            self._phases.pop()  # the outer phase has its time limit again from the start
            self._watch()

    def _watch(self) -> None:
        """Restarts the timer for the innermost phase, or stops it if there is none."""
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
            faulthandler.cancel_dump_traceback_later()
        if self._phases:
            self._notice = Timer(self._seconds, self._print_notice, [self._phases[-1]])
            self._notice.daemon = True
            self._notice.start()
            faulthandler.dump_traceback_later(self._seconds + _STACKS_DELAY, file=_STDERR)

    def _print_notice(self, phase: str) -> None:
        print(
            f"Rank {self._rank} has been in phase {phase!r} for {self._seconds:g} seconds (`phase_timeout`). It keeps "
            "running; stacks of its threads:",
            file=sys.__stderr__,
            flush=True,
        )
