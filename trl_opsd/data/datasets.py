"""Operations on whole datasets: their columns, a digest of their contents, and the check of all their rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_opsd.data.admission import admit
from trl_opsd.data.readers import Reader

logger = get_logger(__name__)

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset] | None


def columns_of(dataset: AnyDataset | None) -> list[str] | None:
    """The columns of the rows as they are read, after a transform if there is one; `None` if not known."""
    if dataset is None:
        return None
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom" and len(dataset):
        return list(dataset[0])
    names: list[str] | None = dataset.column_names
    return names


def by_name(eval_dataset: EvalDatasets) -> dict[str, AnyDataset | None]:
    """Evaluation datasets by their names in messages."""
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def describe_rows(dataset: Any, columns: Collection[str] | None) -> str:
    """The number of rows and a digest of their contents, identical on every machine and in every process.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            A stream is not read; its description is "a stream".
        columns (`Collection[str]`, *optional*):
            The columns to include. When `None`, or when a transform computes the rows from other columns: all of them.
    """
    if dataset is None or isinstance(dataset, IterableDataset):
        return "none" if dataset is None else "a stream"
    has_transform = dataset.format["type"] == "custom"
    dataset = dataset.with_format("arrow")  # as stored: decoding a column may not be deterministic
    if columns is not None and not has_transform:
        dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    digest = hashlib.sha256()
    for table in dataset.iter(batch_size=1000):
        for row in table.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return f"{len(dataset)} rows, sha256 {digest.hexdigest()[:16]}"


def admit_all(
    train_dataset: AnyDataset | None, eval_dataset: EvalDatasets, reader: Reader, dropped: Counter[str] | None
) -> tuple[AnyDataset | None, EvalDatasets]:
    """Checks every row of the training and evaluation datasets, unless the reader does not need the check.

    Args:
        train_dataset, eval_dataset:
            As the trainer takes them.
        reader ([`~data.readers.Reader`]):
            The reader that must be able to read them.
        dropped (`Counter`, *optional*):
            As [`~data.admission.admit`] takes it.

    Returns:
        Both, without the dropped rows.
    """

    def admitted(name: str, dataset: AnyDataset | None) -> AnyDataset | None:
        if dataset is None or not reader.is_needed(columns_of(dataset)):
            return dataset
        before = Counter(dropped)
        left: AnyDataset = admit(dataset, name, reader, dropped)
        if dropped is not None and (count := dropped[name] - before[name]):
            logger.warning(
                f"{count} prompts of {name} leave no room for a completion of `max_completion_length` tokens in the "
                f"context and were dropped; {len(left)} are left."
            )
        return left

    train = admitted("train_dataset", train_dataset)
    evals = {name: admitted(name, dataset) for name, dataset in by_name(eval_dataset).items()}
    if isinstance(eval_dataset, dict):
        return train, dict(zip(eval_dataset, evals.values(), strict=True))
    return train, evals["eval_dataset"]
