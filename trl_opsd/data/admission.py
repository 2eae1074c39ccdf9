"""Reads a whole dataset before training starts, with the eyes of one reader, as far as it can be read ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from datasets import IterableDataset

from trl_opsd.data.prompts import PromptLimits, check_prompts
from trl_opsd.data.teacher_prompts import COLUMNS, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What the student, or a teacher, makes of a row."""

    prompt_of: Callable[[Row, str], Any]
    """The prompt of a row; takes the row's name for messages, and checks what it returns."""
    tokenize: Callable[[list[Any]], list[list[int]]]
    """Turns prompts of one kind into token ids, chat template included."""
    limits_of: Callable[[Row], PromptLimits]
    """What the tokens must keep to."""
    has_template: bool
    """Whether the tokenizer has a chat template."""

    def prompts(
        self, rows: Sequence[Row], names: Sequence[str], kind: str | None = None
    ) -> tuple[list[Any], str | None]:
        """Prompts of rows, all of one kind, and that kind.

        Raises:
            ValueError: A prompt cannot be read; the message names the row.
            TypeError: It is neither text nor messages.
        """
        prompts = [self.prompt_of(row, name) for row, name in zip(rows, names, strict=True)]
        kind = check_prompts(
            ((prompt, f"The prompt in {name}") for prompt, name in zip(prompts, names, strict=True)), kind
        )
        if kind == "messages" and not self.has_template:
            raise ValueError(
                f"The prompt in {names[0]} is messages, but the tokenizer has no chat template: set "
                "`tokenizer.chat_template`, or give the prompts as text."
            )
        return prompts, kind


def look_ahead(dataset: Any, where: str, prompt_of: Callable[[Row, str], Any]) -> None:
    """Checks of every row what needs no tokenizer, so that a bad one is refused before a model is loaded.

    A stream cannot be read ahead, and a transform is run only when there is a tokenizer for what it makes: their rows
    are checked later.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Its columns have been checked.
        where (`str`):
            Its name, for the messages.
        prompt_of (`Callable`):
            As [`Reader.prompt_of`].

    Raises:
        ValueError: A row cannot be read; the message names it.
        TypeError: A prompt is neither text nor messages.
    """
    if isinstance(dataset, IterableDataset) or _is_made_by_a_transform(dataset):
        return
    kind = None
    for rows in _named_rows(dataset, where):
        kind = check_prompts(((prompt_of(row, name), f"The prompt in {name}") for name, row in rows.items()), kind)


def admit(dataset: Any, where: str, reader: Reader, dropped: Counter[str] | None) -> Any:
    """Checks every row, and leaves out those that are too long if asked for.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            A stream cannot be read ahead: its rows are checked when they are used, and filtered here if asked for.
        where (`str`):
            Its name, for the messages.
        reader ([`Reader`]):
            Who has to be able to read it.
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
    for rows in _named_rows(dataset, where):
        prompts, kind = reader.prompts(list(rows.values()), list(rows), kind)
        for (name, row), prompt_ids in zip(rows.items(), reader.tokenize(prompts), strict=True):
            limits = reader.limits_of(row)
            if dropped is None or limits.fits(prompt_ids):
                limits.check(prompt_ids, f"The prompt in {name}")
                kept.append(number)
            number += 1
    if dropped is None or len(kept) == number:
        return dataset
    dropped[where] += number - len(kept)
    return dataset.select(kept)


def _named_rows(dataset: Any, where: str) -> Iterator[dict[str, Row]]:
    """Batches of rows by the name a message gives them."""
    # A transform may make the prompts out of other columns; any other format is only a way to look at them.
    if not _is_made_by_a_transform(dataset):
        dataset = dataset.with_format(None)
        dataset = dataset.select_columns([name for name in ("prompt", *COLUMNS) if name in dataset.column_names])
    number = count()
    for batch in dataset.iter(batch_size=1000):
        rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        yield {f"row {next(number)} of {where}": row for row in rows}


def _is_made_by_a_transform(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")


def _stays(where: str, reader: Reader, dropped: Counter[str]) -> Callable[[Any], bool]:
    """Whether a row of a stream stays in it."""

    def stays(row: dict[str, Any]) -> bool:
        prompts, _ = reader.prompts([row], [f"a row that {where} streams"])
        fits = reader.limits_of(row).fits(reader.tokenize(prompts)[0])
        dropped[where] += not fits
        return fits

    return stays
