"""Assigns dataset rows to processes such that each row is read exactly once.

accelerate shards a map-style dataset by rows, but a `datasets` stream of several files by files. Files have unequal
lengths, and sharding by file ignores that TRL repeats the rows of a generation batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, final

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchStream

__all__ = ["WholeStream", "check_alike"]


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
