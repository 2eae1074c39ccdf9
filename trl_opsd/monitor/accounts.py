"""Accumulates sums over tokens, and seconds of each phase of a step, since the last log or in an evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch

from trl_opsd.monitor.metrics import METRICS

__all__ = ["Accounts", "PhaseClock"]


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
        start = perf_counter()
        self._inside.append(0.0)
        try:
            with self._watch(phase):
                yield
        finally:
            inside = self._inside.pop()
            self._synchronize()
            elapsed = perf_counter() - start
            self.seconds[phase] += elapsed - inside
            if self._inside:
                self._inside[-1] += elapsed

    def _synchronize(self) -> None:
        """Synchronizes the device where a nested phase begins or ends, so that queued work counts for its own phase."""
        if self._inside and torch.accelerator.is_available():
            torch.accelerator.synchronize()


class Accounts:
    """Accumulated sums by name, and a clock; `watch` as in [`PhaseClock`]."""

    def __init__(self, watch: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.clock = PhaseClock(watch)
        self._totals: dict[str, float] = defaultdict(float)
        self._batches = 0

    def clear(self) -> None:
        """Resets all sums and times."""
        self._totals.clear()
        self._batches = 0
        self.clock.seconds.clear()

    def count_batch(self) -> None:
        """Counts a generation batch."""
        self._batches += 1

    def add(self, sums: Mapping[str, float]) -> None:
        """Adds the sums of a loss over all processes, by the names in [`~types.LossParts`]."""
        for name, value in sums.items():
            self._totals[name] += value

    @property
    def loss(self) -> float | None:
        """Weighted mean of the divergence over tokens, in nats; `None` if the weights sum to 0."""
        return self._totals["divergence"] / self._totals["weight"] if self._totals["weight"] else None

    def metrics(self, per_batch: bool) -> dict[str, float]:
        """Means over tokens and seconds of each phase, by their names in the log; empty if the weights sum to 0."""
        totals, seconds = self._totals, self.clock.seconds
        if not totals["weight"]:
            return {}
        teachers = [name.removeprefix("weight/") for name in totals if name.startswith("weight/")]
        means = {}
        for name, metric in METRICS.items():
            for teacher in teachers if "<name>" in name else [""]:
                of, _, by = metric.mean_of.replace("<name>", teacher).partition(" / ")
                if of in totals and totals[by]:
                    means[name.replace("<name>", teacher)] = totals[of] / totals[by]
        # Training logs the mean of generation batches, and an evaluation the sum.
        batches = max(self._batches, 1) if per_batch else 1
        return {
            **means,
            **{f"time/{phase}": spent / batches for phase, spent in seconds.items()},
            # Tokens of all processes by the seconds of this one, which waits for the others in each phase.
            "tokens_per_second": totals["tokens"] / max(sum(seconds.values()) - seconds.get("save", 0.0), 1e-9),
        }
