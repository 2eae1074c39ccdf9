"""A dataset as a whole, or several by name: their columns, what is in them, and which of their rows can be used."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_opsd.data.admission import admit
from trl_opsd.data.readers import Reader

logger = get_logger(__name__)

AnyDataset: TypeAlias = Dataset | IterableDataset
EvalDatasets: TypeAlias = AnyDataset | dict[str, AnyDataset] | None


def columns_of(dataset: AnyDataset) -> list[str] | None:
    """The columns as a reader of the rows sees them; a transform may have made them."""
    if isinstance(dataset, Dataset) and dataset.format["type"] == "custom" and len(dataset):
        return list(dataset[0])
    names: list[str] | None = dataset.column_names
    return names


def named(eval_dataset: EvalDatasets) -> dict[str, AnyDataset | None]:
    """Evaluation datasets by the name a message gives them."""
    if isinstance(eval_dataset, dict):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


def with_eval(eval_dataset: EvalDatasets, datasets: Mapping[str, AnyDataset | None]) -> EvalDatasets:
    """The inverse of [`named`]: evaluation datasets as they were given, out of those by name."""
    if isinstance(eval_dataset, dict):
        return {name: datasets[f"eval_dataset[{name!r}]"] for name in eval_dataset}
    return datasets["eval_dataset"]


def describe_rows(dataset: Any, columns: Collection[str] | None) -> str:
    """The number of rows and a digest of their contents, the same on every machine and in every process.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            A stream cannot be read ahead and is only called one.
        columns (`Collection[str]`, *optional*):
            The columns somebody reads. When `None`, or when a transform makes the rows out of others: all of them.
    """
    if dataset is None or isinstance(dataset, IterableDataset):
        return "none" if dataset is None else "a stream"
    made_on_the_fly = dataset.format["type"] == "custom"
    dataset = dataset.with_format("arrow")  # as stored: what a column decodes to may not be the same thing twice
    if columns is not None and not made_on_the_fly:
        dataset = dataset.select_columns([name for name in dataset.column_names if name in columns])
    digest = hashlib.sha256()
    for table in dataset.iter(batch_size=1000):
        for row in table.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return f"{len(dataset)} rows, sha256 {digest.hexdigest()[:16]}"


def admit_all(
    datasets: Mapping[str, AnyDataset | None],
    reader: Reader,
    dropped: Counter[str],
    policy: str,
    completion: int,
    if_needed: Callable[[list[str] | None], bool] = lambda columns: True,
) -> dict[str, AnyDataset | None]:
    """Has a reader check every row of all datasets, by name.

    Args:
        datasets (`Mapping`):
            By the name a message gives them.
        reader ([`~data.readers.Reader`]):
            Who has to be able to read them.
        dropped (`Counter`):
            Counts rows that are left out, by dataset.
        policy (`str`):
            `overlong_prompts`: `"drop"` leaves out prompts that are too long, `"error"` names them.
        completion (`int`):
            Tokens for which a prompt has to leave room, for the message.
        if_needed (`Callable`, *optional*):
            Takes the columns of a dataset and says whether it has to be looked at.
    """
    admitted = dict(datasets)
    for name, dataset in datasets.items():
        if dataset is None or not if_needed(columns_of(dataset)):
            continue
        before = dropped[name]
        admitted[name] = left = admit(dataset, name, reader, dropped if policy == "drop" else None)
        if count := dropped[name] - before:
            logger.warning(
                f"{count} prompts of {name} leave no room for max_completion_length={completion} tokens in the context "
                f"and were dropped; {len(left)} are left."
            )
    return admitted
