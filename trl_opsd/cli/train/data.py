"""Loads the dataset of a training script as TRL's scripts do, from the Hub or from files; knows no models."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from trl_opsd._compat.trl import DatasetMixtureConfig, ScriptArguments, get_dataset

Splits = Mapping[str, Dataset | IterableDataset]

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""How a single file is loaded, by its suffix."""


def loaded(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """The splits of the dataset that the options name; rejects options of another kind of dataset."""
    if not (mixture.datasets or script.dataset_name):
        raise ValueError(
            "Either `datasets` or `dataset_name` must be provided. Set `--dataset_name` to the name or path of a "
            "dataset, or list several as `datasets` in the file of `--config`."
        )
    if mixture.datasets:
        with _explained("datasets", [one.path for one in mixture.datasets]):
            return get_dataset(mixture)
    if mixture.streaming:
        raise ValueError("`streaming` belongs to `datasets`: with `dataset_name` set `dataset_streaming`.")
    if mixture.test_split_size is not None:
        raise ValueError(
            "`test_split_size` splits what `datasets` lists, and would have no effect on `dataset_name`: name a split "
            "with `dataset_test_split`, or list the dataset as `datasets` in the file of `--config`."
        )
    return _one_dataset(script.dataset_name, script.dataset_config, script.dataset_streaming)


def _one_dataset(name: str, config: str | None, streaming: bool) -> Splits:
    path = Path(name)
    if name in FORMATS.values():
        raise ValueError(
            f"`dataset_name={name!r}` is a format: pass the path of a file or folder of that format; it would load "
            "every file below the working directory."
        )
    if path.is_file() and path.suffix in FORMATS:
        if not path.stat().st_size:
            raise ValueError(f"`dataset_name={name!r}` is an empty file: expected a row in each line.")
        with _explained("dataset_name", [name]):
            return load_dataset(FORMATS[path.suffix], data_files=name, name=config, streaming=streaming)
    if path.is_file():
        raise ValueError(
            f"`dataset_name={name!r}` is a file of no kind that is read here: expected one of {', '.join(FORMATS)}."
        )
    # The files that mark a folder of `save_to_disk`.
    if not any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        with _explained("dataset_name", [name]):
            return load_dataset(name, name=config, streaming=streaming)
    if config is not None:
        raise ValueError(
            f"`dataset_config={config!r}`: {name!r} was written by `save_to_disk` and has only one: remove the option."
        )
    saved = load_from_disk(name)
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    return {split: rows.to_iterable_dataset() if streaming else rows for split, rows in splits.items()}


@contextmanager
def _explained(option: str, names: Sequence[str]) -> Iterator[None]:
    """Names the dataset in errors of `datasets`, which only state that the Hub was not reached, or an error."""
    try:
        yield
    except DatasetGenerationError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(
            f"`{option}={' or '.join(map(repr, names))}` cannot be read as it is written: {why}"
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        absent = [name for name in names if name not in FORMATS.values() and not Path(name).exists()]
        if not absent:
            raise
        raise ValueError(
            f"`{option}={' or '.join(map(repr, absent))}` is neither a file or folder here nor a dataset that the Hub "
            f"gives access to: correct it, or log in. {str(error).splitlines()[0]}"
        ) from error


def split(data: Splits, option: str, name: str) -> Dataset | IterableDataset:
    """One split of a dataset; `option` names it, for the message, which lists those there are."""
    if name in data:
        return data[name]
    close = difflib.get_close_matches(name, data, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    if option == "dataset_test_split":
        hint += " It is needed because `eval_strategy` is set."
    raise ValueError(f"`{option}={name!r}`: expected a split of the dataset, {' or '.join(map(repr, data))}.{hint}")
