"""Decides which rows of a dataset can be answered; it knows what a prompt looks like and nothing of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from datasets import IterableDataset

_HOW_TO_NAME_IT = "rename the column that holds the prompts, for instance `dataset.rename_column('question', 'prompt')`"


def check_columns(columns: Iterable[str] | None, where: str) -> None:
    """Checks the names of the columns; `None` means that they are not known before the first row is read.

    Raises:
        ValueError: There is no `prompt`, or there are images.
    """
    if columns is None:
        return
    names = list(columns)
    if "prompt" not in names:
        raise ValueError(f"{where} has no column 'prompt', only {names}: {_HOW_TO_NAME_IT}.")
    for name in ("image", "images"):
        if name in names:
            raise ValueError(
                f"{where} has a column {name!r}, but prompts with images are not supported yet: remove the column, or "
                "use `trl.DistillationTrainer`, which reads them."
            )


def check_prompt(prompt: Any, where: str) -> str:
    """Checks one prompt.

    Args:
        prompt (`Any`):
            What stands in the `prompt` column.
        where (`str`):
            Where it stands, for the message.

    Returns:
        `str`: `"text"` or `"messages"`.

    Raises:
        ValueError: It is empty, or a message lacks its role or content, or holds something else than text.
        TypeError: It is neither text nor a list of messages.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(
                f"The prompt in {where} is empty: give the student something to answer, or remove the row."
            )
        return "text"
    if not isinstance(prompt, list):
        raise TypeError(
            f"The prompt in {where} is {prompt!r} of type {type(prompt).__name__}: expected a string or a list of "
            "messages such as [{'role': 'user', 'content': '...'}]; fill in or remove the row."
        )
    if not prompt:
        raise ValueError(f"The prompt in {where} is a list without messages: add one, or remove the row.")
    for position, message in enumerate(prompt):
        _check_message(message, f"message {position} of the prompt in {where}")
    return "messages"


def check_prompts(prompts: list[Any], where: str, start: int = 0, kind: str | None = None) -> str | None:
    """Checks many prompts, and that they are all of one kind.

    Args:
        prompts (`list`):
            What stands in the `prompt` column.
        where (`str`):
            What the rows belong to, for the message.
        start (`int`, *optional*, defaults to `0`):
            Number of the first row.
        kind (`str`, *optional*):
            What the rows before these were: `"text"` or `"messages"`.

    Returns:
        `str`, *optional*: the kind of all of them; `None` when there was no row yet.

    Raises:
        ValueError: As [`check_prompt`], naming the row; or text and messages are mixed.
        TypeError: As [`check_prompt`].
    """
    for number, prompt in enumerate(prompts, start):
        found = check_prompt(prompt, f"row {number} of {where}")
        if kind is None:
            kind = found
        elif found != kind:
            raise ValueError(
                f"The prompt in row {number} of {where} is {found}, those before it are {kind}: a dataset holds "
                "prompts of one kind; turn the texts into messages, or the messages into text."
            )
    return kind


def check_rows(rows: list[dict[str, Any]], where: str) -> None:
    """Checks rows just before they are used: those of a stream have not been seen before.

    Raises:
        ValueError: As [`check_columns`] and [`check_prompts`].
        TypeError: As [`check_prompt`].
    """
    for number, row in enumerate(rows):
        check_columns(row, f"row {number} of {where}")
    check_prompts([row["prompt"] for row in rows], where)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise ValueError(f"{where} is {message!r}: expected a dict with 'role' and 'content'.")
    content = message["content"]
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content}
        if kinds <= {"text"}:
            return
        raise ValueError(
            f"{where} holds parts of type {sorted(map(str, kinds))}: only text is supported yet; "
            "use `trl.DistillationTrainer` for prompts with images."
        )
    raise ValueError(f"{where} has the content {content!r}: expected text.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """What a tokenized prompt must keep to so that the student can read it and answer."""

    vocabulary: int
    """Rows of the student's embedding; every token id is smaller."""
    context: int | None
    """Tokens that student and teacher can look at, or `None` where there is no limit."""
    completion: int
    """Tokens to leave free for the answer: `max_completion_length`."""

    def fits(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt leaves room for a whole completion."""
        return self.room(len(prompt_ids)) == self.completion

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may follow so many, as far as a completion and the context go."""
        return self.completion if self.context is None else min(self.completion, self.context - prompt_tokens)

    def check(self, prompt_ids: list[int], where: str) -> None:
        """Raises `ValueError` when the prompt is empty, does not fit, or has a token the student does not know."""
        if not prompt_ids:
            raise ValueError(
                f"The prompt in {where} has no tokens after tokenization: give the student something to answer, or "
                "remove the row."
            )
        if not self.fits(prompt_ids):
            raise ValueError(
                f"The prompt in {where} has {len(prompt_ids)} tokens; with max_completion_length={self.completion} "
                f"that is more than the context of {self.context}: shorten it, lower max_completion_length, "
                "or set overlong_prompts='drop'."
            )
        if max(prompt_ids) >= self.vocabulary:
            raise ValueError(
                f"The prompt in {where} has the token id {max(prompt_ids)}, but the student's embedding has "
                f"{self.vocabulary} rows: pass the tokenizer the student was trained with."
            )

    def check_completion(self, prompt_ids: list[int], completion_ids: list[int], backend: str) -> None:
        """Raises `ValueError` when a rollout wrote what the models cannot read."""
        length = len(prompt_ids) + len(completion_ids)
        if self.context is not None and length > self.context:
            raise ValueError(
                f"{backend} wrote {len(completion_ids)} tokens after a prompt of {len(prompt_ids)}, but the context is "
                f"{self.context}: let it write at most max_completion_length={self.completion}."
            )
        if completion_ids and max(completion_ids) >= self.vocabulary:
            raise ValueError(
                f"{backend} wrote the token id {max(completion_ids)}, but the student's embedding has "
                f"{self.vocabulary} rows: use the student's own tokenizer."
            )


Tokenize = Callable[[list[Any]], list[list[int]]]


def admit(
    dataset: Any,
    where: str,
    *,
    tokenize: Tokenize,
    limits: PromptLimits,
    has_template: bool,
    dropped: Counter[str] | None,
) -> Any:
    """Reads a whole dataset before training starts, as far as it can be read.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            A stream cannot be read ahead: its rows are checked when they are used, and filtered here if asked for.
        where (`str`):
            Its name, for the messages.
        tokenize (`Callable[[list], list[list[int]]]`):
            Turns prompts into token ids, chat template included.
        limits ([`PromptLimits`]):
            What every prompt must keep to.
        has_template (`bool`):
            Whether the tokenizer has a chat template.
        dropped (`Counter`, *optional*):
            Leave out prompts that do not fit and count them here under the name of the dataset, those of a stream as it
            is read. When `None`, such a prompt is an error.

    Returns:
        The dataset without the dropped rows.

    Raises:
        ValueError: A row cannot be trained on; the message names it.
        TypeError: As [`check_prompt`].
    """
    if isinstance(dataset, IterableDataset):
        return dataset if dropped is None else dataset.filter(_stays(where, tokenize, limits, dropped))
    kept: list[int] = []
    number = 0
    kind = None
    # A transform may make the prompts out of other columns; any other format is only a way to look at them.
    made = dataset.format["type"] == "custom"
    readable = dataset if made else dataset.with_format(None).select_columns("prompt")
    for batch in readable.iter(batch_size=1000):
        kind = check_prompts(batch["prompt"], where, start=number, kind=kind)
        if kind == "messages" and not has_template:
            raise ValueError(
                f"{where} holds messages, but the tokenizer has no chat template: set `tokenizer.chat_template`, or "
                "give the prompts as text."
            )
        for prompt_ids in tokenize(batch["prompt"]):
            if dropped is None or limits.fits(prompt_ids):
                limits.check(prompt_ids, f"row {number} of {where}")
                kept.append(number)
            number += 1
    if dropped is None or len(kept) == number:
        return dataset
    dropped[where] = number - len(kept)
    return dataset.select(kept)


def _stays(where: str, tokenize: Tokenize, limits: PromptLimits, dropped: Counter[str]) -> Callable[[Any], bool]:
    """Whether a row of a stream stays in it."""

    def stays(row: dict[str, Any]) -> bool:
        check_rows([row], f"what {where} streams")
        fits = limits.fits(tokenize([row["prompt"]])[0])
        dropped[where] += not fits
        return fits

    return stays
