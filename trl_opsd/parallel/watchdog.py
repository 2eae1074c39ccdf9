"""Prints the stacks of all threads to stderr when a phase exceeds its time limit; the run continues."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

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
