"""Tells how long each phase of a step took; it knows the names of the phases and nothing of what they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch


class PhaseClock:
    """Adds up the seconds of named phases, each without the phases that ran inside it.

    Args:
        watch (`Callable`, *optional*):
            Takes the name of a phase and returns a context that is open as long as the phase goes on.

    Example:

    ```python
    >>> clock = PhaseClock()
    >>> with clock("compare"):
    ...     with clock("teach"):
    ...         pass
    >>> sorted(clock.seconds)
    ['compare', 'teach']
    ```
    """

    def __init__(self, watch: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._watch = watch
        self._inside: list[float] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._settle()
        start = perf_counter()
        self._inside.append(0.0)
        try:
            with self._watch(phase):
                yield
        finally:
            inside = self._inside.pop()
            self._settle()
            elapsed = perf_counter() - start
            self.seconds[phase] += elapsed - inside
            if self._inside:
                self._inside[-1] += elapsed

    def _settle(self) -> None:
        """Waits where an inner phase begins or ends, so that queued work is billed to the phase that queued it."""
        if self._inside and torch.accelerator.is_available():
            torch.accelerator.synchronize()
