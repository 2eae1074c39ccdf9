"""Checks the rows of a whole dataset before training starts, as far as they can be read ahead."""

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
    """Runs the checks that need no tokenizer on every row, so that a bad one is refused before a model is loaded.

    A stream cannot be read ahead, and a transform may need the tokenizer: their rows are checked later.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Its columns have been checked.
        where (`str`):
            Its name in messages.
        intake ([`~data.intake.Intake`]):
            Parses the rows.

    Raises:
        ValueError: A row is invalid; the message names it.
        TypeError: A prompt is neither text nor messages.
    """
    if isinstance(dataset, IterableDataset) or _has_transform(dataset):
        return
    kind = None
    for requests in _requests(dataset, where, intake):
        kind = common_kind((request.student for request in requests), kind)


def admit(dataset: Any, where: str, reader: Reader, dropped: Counter[str] | None) -> Any:
    """Checks every row, and optionally drops those with overlong prompts.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            The rows of a stream are not checked here but when they are used; overlong ones are filtered while it is
            read, if `dropped` is given.
        where (`str`):
            Its name in messages.
        reader ([`~data.readers.Reader`]):
            The reader that must be able to read the prompts.
        dropped (`Counter`, *optional*):
            If given, prompts that do not fit are dropped and counted here under the name of the dataset; those of a
            stream while it is read. When `None`, such a prompt is an error.

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
    """The parsed rows, a batch at a time."""
    # A transform may compute the prompts from other columns; any other format only changes the type of the values.
    if not _has_transform(dataset):
        dataset = dataset.with_format(None)
        dataset = dataset.select_columns([name for name in COLUMNS if name in dataset.column_names])
    number = count()
    for batch in dataset.iter(batch_size=1000):
        rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        yield [intake.read(row, f"row {next(number)} of {where}") for row in rows]


def _has_transform(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")


def _stays(where: str, reader: Reader, dropped: Counter[str]) -> Callable[[Any], bool]:
    """A filter for the rows of a stream, which keeps those whose prompt fits and counts the others."""

    def stays(row: dict[str, Any]) -> bool:
        request = reader.intake.read(row, f"a row that {where} streams")
        prompts = [reader.prompt_of(request)]
        reader.check_kind(prompts)
        fits = reader.limits_of(request).fits(reader.token_ids(prompts)[0])
        dropped[where] += not fits
        return fits

    return stays
