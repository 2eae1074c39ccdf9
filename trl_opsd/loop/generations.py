"""Has several completions generated for each prompt, in adjacent rows of a generation batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from datasets import IterableDataset
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from trl_opsd._compat.trl import DistillationTrainer, repeat_iterable_dataset
from trl_opsd._compat.versions import set_known
from trl_opsd.config import OPSDConfig
from trl_opsd.data.intake import Request

__all__ = ["SEAMS", "Generations"]

SEAMS: dict[str, tuple[str, ...]] = {
    "get_train_dataloader": ("self",),
    "_get_train_sampler": ("self", "dataset"),
    "_get_dataloader": (
        "self",
        "dataset",
        "description",
        "batch_size",
        "sampler_fn",
        "is_training",
        "dataloader_key",
    ),
}
"""Overridden methods of TRL's trainer, with their parameters; a test compares them with the installed ones."""


class Generations(DistillationTrainer):
    """A trainer that repeats rows as TRL's GRPO trainer does: each in `num_generations` consecutive places of a batch.

    Places are counted over all processes, so several may generate and train on the completions of a prompt.
    """

    args: OPSDConfig

    @property
    def _evaluated_generations(self) -> int:
        return self.args.num_generations_eval or self.args.num_generations

    @property
    def _rows_of_step(self) -> int:
        calls = self.args.gradient_accumulation_steps
        return self.args.per_device_train_batch_size * self.accelerator.num_processes * calls

    # ---- The order of the rows ----------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        sampler = super()._get_train_sampler(dataset)
        number = self.args.num_generations
        # TRL's sampler repeats each of `batch_size` prompts, so that a step has as many rows as before.
        set_known(sampler, mini_repeat_count=number, batch_size=sampler.batch_size // number)
        return sampler

    def get_train_dataloader(self) -> DataLoader:
        """As TRL's, which repeats the rows of a stream for accumulation only."""
        stream, number = self.train_dataset, self.args.num_generations
        if number == 1 or not isinstance(stream, IterableDataset):
            return super().get_train_dataloader()
        if self.shuffle_dataset:
            stream = stream.shuffle(seed=self.args.seed)
        calls = self.args.gradient_accumulation_steps
        return self._get_dataloader(
            dataset=repeat_iterable_dataset(stream, number, self._rows_of_step // number, calls),
            description="Training",
            batch_size=self._train_batch_size * calls,
            is_training=True,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        number = self._evaluated_generations
        if not is_training and number > 1:
            if isinstance(dataset, IterableDataset):
                dataset = repeat_iterable_dataset(dataset, number)
            else:  # the rows themselves: accelerate has to know how many there are, not a sampler alone
                order = range(len(dataset)) if sampler_fn is None else list(sampler_fn(dataset))
                dataset, sampler_fn = dataset.select(np.repeat(order, number)), SequentialSampler
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def number_rows(self, rows: Sequence[Request]) -> None:
        """Sets the place of each row in the generation batch, over all processes."""
        first = self.accelerator.process_index * len(rows)
        for place, row in enumerate(rows, start=first):
            row.place = place
