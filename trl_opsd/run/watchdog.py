"""Says on stderr what every thread is doing when a phase takes longer than it may; it ends nothing."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

_AFTER_THE_NOTICE = 0.3
"""Seconds, so that the stacks come after the line that says whose they are."""

_STDERR = 2
"""As a file descriptor: a notebook's `sys.stderr` has none, and printing may not need Python."""


class Watchdog:
    """Reports phases that go on for too long, each without the phases that ran inside it.

    The stacks are printed by a thread that needs no Python lock, so also when a library has hung while it holds that;
    only the line that names the phase is missing then.

    Args:
        seconds (`float`, *optional*):
            How long a phase may take; `None` watches nothing.
        rank (`int`):
            Of this process.
    """

    def __init__(self, seconds: float | None, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._phases: list[str] = []
        self._notice: Timer | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Watches what runs inside, under this name."""
        if self._seconds is None:
            yield
            return
        self._phases.append(phase)
        self._watch(self._seconds)
        try:
            yield
        finally:
            self._phases.pop()
            self._watch(self._seconds)

    def _watch(self, seconds: float) -> None:
        """Begins anew with the innermost phase, or stops where there is none."""
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None
            faulthandler.cancel_dump_traceback_later()
        if self._phases:
            self._notice = Timer(seconds, self._say, [self._phases[-1], seconds])
            self._notice.daemon = True
            self._notice.start()
            faulthandler.dump_traceback_later(seconds + _AFTER_THE_NOTICE, file=_STDERR)

    def _say(self, phase: str, seconds: float) -> None:
        print(
            f"Rank {self._rank} has been in phase {phase!r} for {seconds:g} seconds (`phase_timeout`). It goes on; "
            "this is where its threads are:",
            file=sys.__stderr__,
            flush=True,
        )
