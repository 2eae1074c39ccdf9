"""Makes transformers' trainer read each row of a dataset once, however many processes read it.

This file knows when a dataloader is built and where it resumes; `data/row_sharding.py` splits rows between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trl_opsd.data.row_sharding import WholeStream
from trl_opsd.options.rules import batch_in_words

__all__ = ["SEAMS", "EachRowOnce"]

SEAMS: dict[str, tuple[str, ...]] = {
    "_get_dataloader": (
        "self",
        "dataset",
        "description",
        "batch_size",
        "sampler_fn",
        "is_training",
        "dataloader_key",
    ),
    "_init_training_state": (
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""

_ONE_READER = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}


class EachRowOnce(Trainer):
    """A trainer whose processes split the rows of a stream as they split those of a map-style dataset."""

    row_columns: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._streams: dict[str, WholeStream | None] = {"train": None, "eval": None}
        super().__init__(*args, **kwargs)

    def check_same_rows(self, mode: str) -> None:
        """Rejects a stream that gave the processes different rows, before the rows are used. Collective."""
        stream = self._streams[mode]
        if stream is None or self.accelerator.num_processes == 1:
            return
        digest = torch.tensor([stream.digest], device=self.accelerator.device)
        if self.accelerator.gather(digest).unique().numel() > 1:
            raise ValueError(
                "The processes read different rows from the stream, so that some rows would be skipped and others "
                "repeated: give all processes the same stream. Shuffle it with a seed, and do not split it by process."
            )

    def gather_distinct_rows(self, rows: Tensor) -> Tensor:
        """Gathers one entry per row of an evaluation batch, without the padding of the last one. Collective."""
        stream = self._streams["eval"]
        if stream is None:
            gathered: Tensor = self.accelerator.gather_for_metrics(rows)
            return gathered
        # accelerate does not know the length of a stream; by the last batch, it has ended and its rows are counted.
        left = stream.rows % (self.args.eval_batch_size * self.accelerator.num_processes)
        is_last = self.accelerator.gradient_state.end_of_dataloader
        whole: Tensor = self.accelerator.gather(rows)
        return whole[:left] if is_last and left else whole

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', which does not know how many rows a stream has, nor which of them pad its last batch."""
        output = super().evaluation_loop(*args, **kwargs)
        stream = self._streams["eval"]
        if stream is None:
            return output
        found = output.predictions
        return output._replace(num_samples=stream.rows, predictions=None if found is None else found[: stream.rows])

    # ---- Building -----------------------------------------------------------------------------------------------

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        stream, options = None, {}
        if isinstance(dataset, IterableDataset):
            stream = dataset = WholeStream(dataset, self.row_columns, self._if_empty(description, is_training))
            options = _ONE_READER  # several workers would each read all of it
            # Else the main process would read for all; `WholeStream` splits the rows itself.
            self.accelerator.dataloader_config.dispatch_batches = False
        elif not is_training:
            # A kept loader would continue with another order, and would be reused for the next dataset.
            options = {"dataloader_persistent_workers": False}
            if not len(dataset):
                raise ValueError(f"{description}: the dataset has no rows: pass one that has some.")
        self._streams["train" if is_training else "eval"] = stream
        with self._with_options(options):
            loader = super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
            if self.args.dataloader_persistent_workers:
                # Workers are seeded when they start. A seed drawn from training's random state would be drawn once in
                # a whole run, and once more in a resumed one.
                loader.base_dataloader.generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    @contextmanager
    def _with_options(self, options: dict[str, Any]) -> Iterator[None]:
        before = {name: getattr(self.args, name) for name in options}
        for name, value in options.items():
            setattr(self.args, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.args, name, value)

    def _if_empty(self, description: str, is_training: bool) -> str:
        if not is_training:
            return f"{description}: the stream has no rows: pass one that has some."
        return (
            f"The stream `train_dataset` ended before it filled one generation batch of {batch_in_words(self.args)}: "
            "give it more rows, or lower one of those numbers."
        )

    # ---- Resuming -----------------------------------------------------------------------------------------------

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """As transformers', which counts all steps of a stream as its first pass."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or self._streams["train"] is None or self.args.ignore_data_skip:
            return begin
        passes, steps = _position(TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_NAME)))
        return passes, steps * self.args.gradient_accumulation_steps


def _position(state: TrainerState) -> tuple[int, int]:
    """Completed passes over a stream, and optimizer steps since the last; `epoch` is passes + steps / max_steps."""
    total = round((state.epoch or 0.0) * state.max_steps)
    if total == state.global_step:
        return 0, total
    return divmod(total, state.max_steps)
