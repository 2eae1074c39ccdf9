"""Reads a whole dataset before training starts, with the eyes of one reader, as far as it can be read ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from datasets import IterableDataset

from trl_opsd.data.intake import Intake, Request
from trl_opsd.data.prompts import common_kind
from trl_opsd.data.readers import Reader
from trl_opsd.data.teacher_prompts import COLUMNS


def look_ahead(dataset: Any, where: str, intake: Intake) -> None:
    """Checks of every row what needs no tokenizer, so that a bad one is refused before a model is loaded.

    A stream cannot be read ahead, and a transform is run only when there is a tokenizer for what it makes: their rows
    are checked later.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Its columns have been checked.
        where (`str`):
            Its name, for the messages.
        intake ([`~data.intake.Intake`]):
            Reads the rows.

    Raises:
        ValueError: A row cannot be read; the message names it.
        TypeError: A prompt is neither text nor messages.
    """
    if isinstance(dataset, IterableDataset) or _is_made_by_a_transform(dataset):
        return
    kind = None
    for requests in _requests(dataset, where, intake):
        kind = common_kind((request.student for request in requests), kind)


def admit(dataset: Any, where: str, reader: Reader, dropped: Counter[str] | None) -> Any:
    """Checks every row, and leaves out those that are too long if asked for.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            A stream cannot be read ahead: its rows are checked when they are used, and filtered here if asked for.
        where (`str`):
            Its name, for the messages.
        reader ([`~data.readers.Reader`]):
            Who has to be able to read the prompts.
        dropped (`Counter`, *optional*):
            Leave out prompts that do not fit and count them here under the name of the dataset, those of a stream as it
            is read. When `None`, such a prompt is an error.

    Returns:
        The dataset without the dropped rows.

    Raises:
        ValueError: A row cannot be trained on; the message names it.
        TypeError: A prompt is neither text nor messages.
    """
    if isinstance(dataset, IterableDataset):
        return dataset if dropped is None else dataset.filter(_stays(where, reader, dropped))
    kept: list[int] = []
    number, kind = 0, None
    for requests in _requests(dataset, where, reader.intake):
        prompts = [reader.prompt_of(request) for request in requests]
        kind = reader.check_kind(prompts, kind)
        for request, prompt, ids in zip(requests, prompts, reader.token_ids(prompts), strict=True):
            limits = reader.limits_of(request)
            if dropped is None or limits.fits(ids):
                limits.check(ids, prompt.where)
                kept.append(number)
            number += 1
    if dropped is None or len(kept) == number:
        return dataset
    dropped[where] += number - len(kept)
    return dataset.select(kept)


def _requests(dataset: Any, where: str, intake: Intake) -> Iterator[list[Request]]:
    """The rows, a batch at a time."""
    # A transform may make the prompts out of other columns; any other format is only a way to look at them.
    if not _is_made_by_a_transform(dataset):
        dataset = dataset.with_format(None)
        dataset = dataset.select_columns([name for name in COLUMNS if name in dataset.column_names])
    number = count()
    for batch in dataset.iter(batch_size=1000):
        rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        yield [intake.read(row, f"row {next(number)} of {where}") for row in rows]


def _is_made_by_a_transform(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")


def _stays(where: str, reader: Reader, dropped: Counter[str]) -> Callable[[Any], bool]:
    """Whether a row of a stream stays in it."""

    def stays(row: dict[str, Any]) -> bool:
        request = reader.intake.read(row, f"a row that {where} streams")
        prompts = [reader.prompt_of(request)]
        reader.check_kind(prompts)
        fits = reader.limits_of(request).fits(reader.token_ids(prompts)[0])
        dropped[where] += not fits
        return fits

    return stays
