"""What a training, or an evaluation, has added up since the last log: sums over tokens, and seconds of each phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trl_opsd.run.clock import PhaseClock
from trl_opsd.run.metrics import of_tokens


class Accounts:
    """Sums by name, and a clock.

    Args:
        watch (`Callable`):
            As [`~run.clock.PhaseClock`] takes it.
    """

    def __init__(self, watch: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.clock = PhaseClock(watch)
        self._totals: dict[str, float] = defaultdict(float)
        self._batches = 0

    def clear(self) -> None:
        """Forgets everything."""
        self._totals.clear()
        self._batches = 0
        self.clock.seconds.clear()

    def count_batch(self) -> None:
        """Counts a generation batch."""
        self._batches += 1

    def add(self, sums: Mapping[str, float]) -> None:
        """Adds the sums of a loss, by the names in [`~types.LossParts`], over all processes."""
        for name, value in sums.items():
            self._totals[name] += value

    @property
    def loss(self) -> float | None:
        """Mean divergence over tokens by their weight, in nats; `None` where no token had any."""
        return self._totals["divergence"] / self._totals["weight"] if self._totals["weight"] else None

    def metrics(self, per_batch: bool) -> dict[str, float]:
        """Means over tokens by their weight, in nats, and seconds of each phase; empty where no token had a weight.

        Args:
            per_batch (`bool`):
                Divide the seconds by the number of generation batches.
        """
        if not self._totals["weight"]:
            return {}
        return of_tokens(self._totals, self.clock.seconds, max(self._batches, 1) if per_batch else 1)
