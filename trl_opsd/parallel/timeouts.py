"""What ends or reports a hang: timeouts of collectives, and stacks of a phase that takes too long."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from typing import Any

import torch
from torch import distributed
from torch.distributed import constants
from torch.distributed import distributed_c10d as c10d


def set_group_timeout(time: timedelta) -> None:
    """Sets the timeout of later collectives in all process groups of this process that still have torch's default.

    transformers passes `ddp_timeout` to the first group, but not on a CPU. A group that a library creates later, such
    as DeepSpeed's, has torch's default: 10 minutes with NCCL, less than a rollout may take, and 30 with gloo.
    """
    if not distributed.is_initialized():
        return
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
    """Reports phases that exceed `seconds` (`None` for no limit), excluding phases nested inside them.

    The stacks are printed by a thread that does not need the GIL, so they appear even if a library hangs while holding
    it; only the line that names the phase is missing then.
    """

    def __init__(self, seconds: float | None, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._phases: list[str] = []
        self._notice: Timer | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Watches the body as the phase of this name."""
        if self._seconds is None:
            yield
            return
        self._phases.append(phase)
        self._watch(self._seconds)
        try:
            yield
        finally:
            self._phases.pop()  # the outer phase has its time limit again from the start
            self._watch(self._seconds)

    def _watch(self, seconds: float) -> None:
        """Restarts the timer for the innermost phase, or stops it if there is none."""
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
            faulthandler.cancel_dump_traceback_later()
        if self._phases:
            self._notice = Timer(seconds, self._print_notice, [self._phases[-1], seconds])
            self._notice.daemon = True
            self._notice.start()
            faulthandler.dump_traceback_later(seconds + _STACKS_DELAY, file=_STDERR)

    def _print_notice(self, phase: str, seconds: float) -> None:
        print(
            f"Rank {self._rank} has been in phase {phase!r} for {seconds:g} seconds (`phase_timeout`). It continues; "
            "the stacks of its threads:",
            file=sys.__stderr__,
            flush=True,
        )
