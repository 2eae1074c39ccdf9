"""Assigns dataset rows to processes such that each row is read exactly once, and refuses options that break this.

accelerate shards a map-style dataset by rows, but a `datasets` stream of several files by files. Files have unequal
lengths, and sharding by file ignores that TRL repeats the rows of a generation batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, final

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchStream
from transformers import TrainingArguments

__all__ = ["WholeStream", "check_alike", "check_sharing"]

_BREAKS_SHARDING = {
    "split_batches": (
        True,
        "it cuts through the rows of an optimizer step; lower `per_device_train_batch_size` instead",
    ),
    "dispatch_batches": (True, "it sends rows as tensors, and prompts are text; remove it"),
    "even_batches": (False, "one would end an evaluation before the others; remove it, no row is counted twice"),
}
"""Options of accelerate, with the value that would read rows twice or never, and the reason."""


def check_sharing(args: TrainingArguments) -> None:
    """Refuses options with which several processes or workers would not read each row exactly once."""
    for name, (value, why) in _BREAKS_SHARDING.items():
        if getattr(args.accelerator_config, name) is value and (args.world_size > 1 or name == "dispatch_batches"):
            raise ValueError(f"`accelerator_config`: `{name}={value}` on {args.world_size} processes: {why}.")
    in_order = getattr(args, "dataloader_in_order", True)  # transformers before 5.15 is always in order
    if not in_order and args.dataloader_num_workers:
        raise ValueError(
            "`dataloader_in_order=False` would let batches overtake each other, so that rows of an optimizer step are "
            "read twice or never: remove it."
        )


def check_alike(each: Sequence[dict[str, str]]) -> None:
    """Refuses datasets whose descriptions differ between processes, which would then read shards of different data."""
    for process, described in enumerate(each):
        for name, rows in described.items():
            if rows != each[0].get(name):
                raise ValueError(
                    f"`{name}` is another dataset in process {process} ({rows}) than in process 0 "
                    f"({each[0].get(name)}), so they would read shards of different data: give all processes the same "
                    "rows in the same order. Shuffle with a seed, and do not split by process."
                )


@final
class WholeStream(TorchStream):
    """All rows of a stream, in order, in every process, so that accelerate shards by rows instead of files."""

    def __init__(self, stream: IterableDataset, columns: Collection[str], if_empty: str) -> None:
        self._stream = stream
        self._columns = columns
        self._if_empty = if_empty
        self.rows = self.digest = 0  # of this pass so far; the digest is a CRC-32 that processes compare

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order of the next pass if the stream is shuffled."""
        self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.rows = self.digest = 0
        for row in self._stream:
            self.rows += 1
            # Cheap, and enough to notice processes that stream different rows.
            read = repr([row.get(name) for name in self._columns])
            self.digest = zlib.crc32(read.encode(), self.digest)
            yield row
        if not self.rows:
            raise ValueError(self._if_empty)
