"""Accumulates token sums and seconds per phase since the last log, for training or for an evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trl_opsd.monitor.clock import PhaseClock
from trl_opsd.monitor.metrics import token_metrics


class Accounts:
    """Accumulated sums by name, and a clock; `watch` as in [`~monitor.clock.PhaseClock`]."""

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
        """Weighted means over tokens, in nats, and seconds of each phase; empty if the weights sum to 0."""
        if not self._totals["weight"]:
            return {}
        # Training logs the mean of generation batches, and an evaluation the sum.
        return token_metrics(self._totals, self.clock.seconds, max(self._batches, 1) if per_batch else 1)
