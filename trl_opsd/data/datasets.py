"""Operations on whole datasets: their columns, a digest of their contents, and the check of all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

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
