"""Gives the rows of each epoch the order of an uninterrupted run, also when a run resumes in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["EpochCount", "EpochSampler"]


@final
class EpochCount(TrainerCallback):
    """Counts epochs as they begin, starting with the one in which a run starts or resumes.

    The trainer's `state.epoch` counts steps, and falls behind where a callback ends an epoch early.
    """

    def __init__(self) -> None:
        self.number = 0
        """Index of the latest epoch, from 0."""
        self._next = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._next = int(state.epoch or 0)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.number, self._next = self._next, self._next + 1


@final
class EpochSampler(Sampler[int]):
    """TRL's order of the rows in a given epoch, also in a resumed run; TRL's own sampler only counts its iterations."""

    def __init__(self, order: Any, epoch: Callable[[], int]) -> None:
        self._order = order  # its epochs are successive permutations of one generator
        # A callable: `set_epoch` does not reach it through a dataloader that skips batches on several processes.
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._order.shuffle:
            self._order.generator.manual_seed(self._order.seed)
            for _ in range(self._epoch()):
                torch.randperm(self._order.num_samples, generator=self._order.generator)
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
