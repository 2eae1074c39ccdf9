"""Says which process reads which row of a dataset: each row is read once, or the dataset is refused.

Of a map-style dataset accelerate shares out rows, of a `datasets` stream with several files the files. Those have
unequal lengths, and do not know that TRL repeats the rows of a generation batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, final

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchStream
from transformers import TrainingArguments

__all__ = ["WholeStream", "check_alike", "check_sharing"]

_MISSHARED = {
    "split_batches": (
        True,
        "it cuts through the rows of an optimizer step; lower `per_device_train_batch_size` instead",
    ),
    "dispatch_batches": (True, "it hands rows out as tensors, and prompts are text; remove it"),
    "even_batches": (False, "one would end an evaluation before the others; remove it, no row is counted twice"),
}
"""Options of accelerate with which rows would be read twice or never, with that value, and why."""


def check_sharing(args: TrainingArguments) -> None:
    """Refuses options with which several processes or workers would not read each row once.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Complete but for what a subclass adds.

    Raises:
        ValueError: There is one.
    """
    for name, (value, why) in _MISSHARED.items():
        if getattr(args.accelerator_config, name) is value and (args.world_size > 1 or name == "dispatch_batches"):
            raise ValueError(f"`accelerator_config`: `{name}={value}` on {args.world_size} processes: {why}.")
    in_order = getattr(args, "dataloader_in_order", True)  # transformers before 5.15 has no other way
    if not in_order and args.dataloader_num_workers:
        raise ValueError(
            "`dataloader_in_order=False` would let batches overtake each other, so that rows of an optimizer step are "
            "read twice or never: remove it."
        )


def check_alike(each: Sequence[dict[str, str]]) -> None:
    """Refuses datasets that differ between processes: each would take its share of something else.

    Args:
        each (`Sequence[dict[str, str]]`):
            For each process, the datasets it was given: a description by name.

    Raises:
        ValueError: Two differ; the message names the process.
    """
    for process, described in enumerate(each):
        for name, rows in described.items():
            if rows != each[0].get(name):
                raise ValueError(
                    f"`{name}` is another dataset in process {process} ({rows}) than in process 0 "
                    f"({each[0].get(name)}), and each would take its share of something else: give all processes the "
                    "same rows in the same order. Shuffle with a seed, and do not split by process."
                )


@final
class WholeStream(TorchStream):
    """The rows of a stream, in their order, in every process; accelerate then shares out rows instead of files.

    Args:
        stream ([`~datasets.IterableDataset`]):
            Of any number of files.
        columns (`Collection[str]`):
            Those that tell whether two processes read the same row.
        if_empty (`str`):
            What is said of a pass without a row.

    Attributes:
        rows (`int`): how many were read in this pass.
        digest (`int`): of what was read in this pass, for processes to compare.
    """

    def __init__(self, stream: IterableDataset, columns: Collection[str], if_empty: str) -> None:
        self._stream = stream
        self._columns = columns
        self._if_empty = if_empty
        self.rows = self.digest = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffles the next pass in an order of its own, if the stream is shuffled."""
        self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.rows = self.digest = 0
        for row in self._stream:
            self.rows += 1
            read = repr([row.get(name) for name in self._columns])
            self.digest = zlib.crc32(read.encode(), self.digest)
            yield row
        if not self.rows:
            raise ValueError(self._if_empty)
