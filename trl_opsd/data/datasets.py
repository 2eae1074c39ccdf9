"""Several datasets by name, and which process reads which row of a stream.

accelerate shards a map-style dataset by rows, but a `datasets` stream of several files by files. Files have unequal
lengths, and sharding by file ignores that TRL repeats the rows of a generation batch.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch.utils.data import IterableDataset as TorchStream

from trl_opsd.data.admission import Rows, admit
from trl_opsd.data.readers import Reader
from trl_opsd.data.survey import digest, has_transform

logger = get_logger(__name__)

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset] | None


DIGEST = "digest"
"""Precedes the digest in a description of rows; in older checkpoints it is "sha256", of each row as JSON."""


def columns_of(dataset: AnyDataset | None) -> list[str] | None:
    """The columns of the rows as they are read, after any transform; `None` if unknown."""
    if dataset is None:
        return None
    if isinstance(dataset, Dataset) and has_transform(dataset) and len(dataset):
        return list(dataset[0])
    names: list[str] | None = dataset.column_names
    return names


def by_name(eval_dataset: EvalDatasets) -> dict[str, AnyDataset | None]:
    """Evaluation datasets by their names in messages."""
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def describe_rows(dataset: Any, columns: Collection[str] | None) -> str:
    """The number of rows and a digest of their contents, identical on every machine; a stream is not read."""
    if dataset is None or isinstance(dataset, IterableDataset):
        return "none" if dataset is None else "a stream"
    # A transform may compute the rows from any column.
    found = digest(dataset, None if has_transform(dataset) else columns)
    return f"{len(dataset)} rows, {DIGEST} {found[:16]}"


def admit_all(rows: Mapping[str, Rows], reader: Reader, dropped: Counter[str] | None) -> dict[str, Rows]:
    """Checks the rows of all datasets that need it, and returns them without the dropped ones."""

    def admitted(one: Rows) -> Rows:
        if not reader.is_needed(columns_of(one.dataset)):
            return one
        before = Counter(dropped)
        left = admit(one, reader, dropped)
        if dropped is not None and (count := dropped[one.where] - before[one.where]):
            logger.warning(
                f"{count} prompts of {one.where} leave no room for a completion of `max_completion_length` tokens in "
                f"the context and were dropped; {len(left.dataset)} are left."
            )
        return left

    return {name: admitted(one) for name, one in rows.items()}


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
