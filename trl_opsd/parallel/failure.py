"""How several processes fail: who ends first, timeouts of collectives, stacks of a phase that hangs."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from time import sleep
from typing import Any

import torch
from torch.distributed import DistBackendError, constants
from torch.distributed import distributed_c10d as c10d

_HEAD_START = 5
"""Seconds that a rank which has lost another waits before it ends."""


@contextmanager
def first_failure_first() -> Iterator[None]:
    """Lets a rank that fails because another has gone end later: the launcher names the rank it sees end first."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DistBackendError) or "by peer" in str(error):  # NCCL's, gloo's
            sleep(_HEAD_START)
        raise


def set_group_timeout(time: timedelta) -> None:
    """Sets the timeout of later collectives in all process groups of this process that still have torch's default.

    transformers passes `ddp_timeout` to the first group, but not on a CPU. A group that a library creates later, such
    as DeepSpeed's, has torch's default: 10 minutes with NCCL, less than a rollout may take, and 30 with gloo.
    """
    for group in c10d._world.pg_map:  # torch has no public list of all groups
        for kind in {one.type for one in group._device_types}:
            backend: Any = group._get_backend(torch.device(kind))
            defaults = constants.default_pg_timeout, constants.default_pg_nccl_timeout
            if hasattr(backend, "_set_default_timeout") and backend.options._timeout in defaults:
                backend._set_default_timeout(time)


_STACKS_DELAY = 0.3
"""Seconds between the line that names the phase and the stacks."""


class Watchdog:
    """Prints the name and all stacks of phases that exceed `seconds`, excluding phases nested inside them."""

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
            faulthandler.cancel_dump_traceback_later()
        if self._phases:
            self._notice = Timer(self._seconds, self._print_notice, [self._phases[-1]])
            self._notice.daemon = True
            self._notice.start()
            # Needs no GIL, which a library may hold while it hangs; a notebook's `sys.stderr` is no file, but 2 is.
            faulthandler.dump_traceback_later(self._seconds + _STACKS_DELAY, file=2)

    def _print_notice(self, phase: str) -> None:
        print(
            f"Rank {self._rank} has been in phase {phase!r} for {self._seconds:g} seconds (`phase_timeout`). It keeps "
            "running; stacks of its threads:",
            file=sys.__stderr__,
            flush=True,
        )
