"""Measures the time spent in each phase of a step; knows only the phases' names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch


class PhaseClock:
    """Accumulates seconds per named phase, excluding phases nested inside it.

    `watch` gives a context for each phase; with `now=time.process_time` it counts processor time.
    """

    def __init__(
        self,
        watch: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._watch, self._now = watch, now
        self._inside: list[float] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._synchronize()
        start = self._now()
        self._inside.append(0.0)
        try:
            with self._watch(phase):
                yield
        finally:
            inside = self._inside.pop()
            self._synchronize()
            elapsed = self._now() - start
            self.seconds[phase] += elapsed - inside
            if self._inside:
                self._inside[-1] += elapsed

    def _synchronize(self) -> None:
        """Synchronizes the device where a nested phase begins or ends, so that queued work counts for its own phase."""
        if self._inside and torch.accelerator.is_available():
            torch.accelerator.synchronize()
