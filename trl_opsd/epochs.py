"""Puts the rows of each epoch in the order they have in an uninterrupted run, also when a run begins in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import Sampler

__all__ = ["EpochSampler"]


@final
class EpochSampler(Sampler[int]):
    """TRL's order of the rows in a given epoch; TRL's own sampler only knows how often it was read before.

    Every epoch of an uninterrupted run has TRL's order, and a resumed run starts with that of its own epoch.

    Args:
        order ([`~trl.trainer.utils.RepeatSampler`]):
            TRL's sampler. Its epochs are successive permutations of one generator.
        epoch (`Callable`):
            Tells, when a pass over the rows begins, which epoch that is, counted from 0. It is asked instead of told,
            because a `set_epoch` does not get through the wrappers of a dataloader that skips batches on several
            processes.
    """

    def __init__(self, order: Any, epoch: Callable[[], int]) -> None:
        self._order = order
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._order.shuffle:
            self._order.generator.manual_seed(self._order.seed)
            for _ in range(self._epoch()):
                torch.randperm(self._order.num_samples, generator=self._order.generator)
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
