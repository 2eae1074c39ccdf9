"""The prompts of a dataset row, for the student and for its teacher: their format, limits, and the teacher's context.

`where` is the name of a row or prompt in messages: `"row 3 of train_dataset"`. Messages have the type of an invalid
value, but never its contents, which may be confidential.
It turns dataset rows into text and messages; tokenization happens elsewhere.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypeAlias

IMAGE_COLUMNS = ("image", "images")
"""Columns from which TRL reads images."""
_CONVERSATIONS = ("messages", "conversation", "conversations")
_SHAREGPT = "{'role': {'human': 'user', 'gpt': 'assistant'}.get(one['from'], one['from']), 'content': one['value']}"
"""Code that converts a message in ShareGPT's format."""
_QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")
"""Names of the prompt column in other trainers and well-known datasets."""


def check_columns(
    columns: Iterable[str] | None,
    where: str,
    teachers: Collection[str] = (),
    optional: Collection[str] = (),
    features: Mapping[str, Any] | None = None,
) -> None:
    """Refuses columns without `prompt`, without `teacher` where several are named, or with a misspelt optional one."""
    if columns is None:  # not known before the first row is read
        return
    names = list(columns)
    if "prompt" not in names:
        raise ValueError(f"{where} has no column 'prompt', only {names}: {_how_to_get_prompts(names, features or {})}.")
    if teachers and "teacher" not in names:
        raise ValueError(
            f"There are several teachers, but {where} has no column 'teacher', only {names}: add one with a name from "
            f"{sorted(teachers)} in each row."
        )
    for name in names if optional else ():
        (meant,) = get_close_matches(name, optional, n=1, cutoff=0.85) or [name]
        if meant not in names:
            raise ValueError(
                f"{where} has an unknown column {name!r}; did you mean {meant!r}? Rename it to {meant!r}, or to a less "
                "similar name."
            )


def _how_to_get_prompts(names: Collection[str], features: Mapping[str, Any]) -> str:
    for name in _CONVERSATIONS:
        if name in names:
            messages = f"row[{name!r}][:-1]"
            if "'from'" in str(features.get(name)):
                messages = f"[{_SHAREGPT} for one in {messages}]"
            return (
                "take what precedes the answer in each conversation, for instance `dataset.map(lambda row: "
                f"{{'prompt': {messages}}}, remove_columns={name!r})`"
            )
    # A misspelt 'prompt' first, then the names that well-known datasets use.
    asked = [one for one in _QUESTIONS if one in names] or ["question"]
    found = (get_close_matches("prompt", names, n=1, cutoff=0.75) or asked)[0]
    return f"rename the column that holds the prompts, for instance `dataset.rename_column({found!r}, 'prompt')`"


def check_no_images(row: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError` at an image in an image column; `None` and lists of `None` are no images."""
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        if value is not None and not (isinstance(value, list) and all(one is None for one in value)):
            refuse_images(name, where)


def refuse_images(column: str, where: str) -> NoReturn:
    """Raises `ValueError` for a column that has images in it."""
    raise ValueError(
        f"{where} has a column {column!r} with images in it, but prompts with images are not supported yet: remove the "
        "column, or use `trl.DistillationTrainer`, which supports them."
    )


def check_prompt(prompt: Any, where: str) -> str:
    """Refuses a prompt that is empty or of another type (`TypeError`); returns its kind, `"text"` or `"messages"`."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{where} is empty: add a prompt, or remove the row.")
        return "text"
    if not isinstance(prompt, list):
        raise TypeError(
            f"{where} is {_kind(prompt)}: expected a string or a list of messages such as "
            "[{'role': 'user', 'content': '...'}]; fill in or remove the row."
        )
    if not prompt:
        raise ValueError(f"{where} is a list without messages: add one, or remove the row.")
    for position, message in enumerate(prompt):
        _check_message(message, f"{where}: message {position}")
    return "messages"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt."""

    value: Any
    """Text, or messages."""
    kind: str
    """`"text"` or `"messages"`."""
    where: str
    """`"The prompt in row 3 of train_dataset"`."""

    @property
    def has_parts(self) -> bool:
        """Whether a message's content is a list of parts."""
        return self.kind == "messages" and any(isinstance(one["content"], list) for one in self.value)

    @classmethod
    def of(cls, value: Any, where: str) -> Prompt:
        """Checks a prompt, which must not end with a message of the assistant."""
        # TRL always has the chat template open a turn of the assistant, so a last message of the assistant would be
        # closed, not continued.
        kind = check_prompt(value, where)
        if kind == "messages" and value[-1]["role"] == "assistant":
            raise ValueError(
                f"{where} ends with a message of the assistant, but the assistant's answer is what the student "
                "generates, and the chat template would start another turn: remove the answer, `prompt = "
                "messages[:-1]`, or rename the column to 'messages', which is split that way."
            )
        return cls(value, kind, where)


def common_kind(prompts: Iterable[Prompt], kind: str | None = None) -> str | None:
    """The kind of all these prompts and of those before them, `None` without any; refuses a mixture."""
    for prompt in prompts:
        kind = kind or prompt.kind
        if prompt.kind != kind:
            raise ValueError(
                f"{prompt.where} is {prompt.kind}, but earlier ones are {kind}: expected one kind for all; convert the "
                "texts to messages, or the messages to text."
            )
    return kind


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        found = f"a dict with {sorted(map(str, message))}" if isinstance(message, dict) else _kind(message)
        hint = f", `[{_SHAREGPT} for one in row['prompt']]`" if found == "a dict with ['from', 'value']" else ""
        raise ValueError(f"{where} is {found}: expected a dict with 'role' and 'content'{hint}.")
    content = message["content"]
    # A call of tools may stand in place of content.
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content}
        if kinds <= {"text"}:
            return
        raise ValueError(
            f"{where} has parts of type {sorted(map(str, kinds))}, but only text is supported so far: "
            "use `trl.DistillationTrainer` for prompts with images."
        )
    raise ValueError(f"{where}: its content is {_kind(content)}: expected text.")


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits of a tokenized prompt that leave room for a completion."""

    vocabulary: int
    """Number of token ids that student and teacher share."""
    context: int | None
    """Context length in tokens, or `None` for no limit."""
    completion: int
    """Tokens reserved for the completion: `max_completion_length`."""
    reader: str = "the student"
    """The model whose context it is, in messages."""

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length leaves room for a whole completion."""
        return self.room(prompt_tokens) == self.completion

    def admits(self, prompt_tokens: int, largest_id: int) -> bool:
        """Whether a prompt of this length and with this largest token id passes [`check`]."""
        return bool(prompt_tokens) and self.fits(prompt_tokens) and largest_id < self.vocabulary

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may follow a prompt of this length."""
        return self.completion if self.context is None else min(self.completion, self.context - prompt_tokens)

    @property
    def room_for_prompt(self) -> int | None:
        """The maximum number of tokens of a prompt; `None` for no limit."""
        return None if self.context is None else self.context - self.completion

    def covers(self, other: PromptLimits) -> bool:
        """Whether every prompt within the other limits is within these."""
        # Where a teacher's limits are no stricter in any respect, its prompts need no check of their own.
        wide = self.context is None or (other.context is not None and other.context <= self.context)
        return wide and other.vocabulary <= self.vocabulary and other.completion >= self.completion

    def check_room(self) -> None:
        """Raises `ValueError` when a completion alone fills the context."""
        if self.context is not None and self.completion >= self.context:
            raise ValueError(
                f"`max_completion_length={self.completion}` leaves no room for a prompt in the context of "
                f"{self.reader} ({self.context} tokens): lower it."
            )

    def check(self, prompt_tokens: int, largest_id: int, where: str) -> None:
        """Raises `ValueError` when the prompt is empty, does not fit, or has a token id outside the vocabulary."""
        if not prompt_tokens:
            raise ValueError(f"{where} has no tokens after tokenization: add a prompt, or remove the row.")
        if not self.fits(prompt_tokens):
            raise ValueError(
                f"{where} has {prompt_tokens} tokens; with a completion of {self.completion} this exceeds the context "
                f"of {self.reader} ({self.context} tokens): shorten it, lower max_completion_length, or set "
                "overlong_prompts='drop'."
            )
        self.check_known(largest_id, where)

    def check_completion(self, prompt_ids: list[int], completion_ids: list[int], backend: str) -> None:
        """Raises `ValueError` when a completion exceeds the limits or has token ids outside the vocabulary."""
        length = len(prompt_ids) + len(completion_ids)
        if self.context is not None and length > self.context:
            raise ValueError(
                f"{backend} generated {len(completion_ids)} tokens after a prompt of {len(prompt_ids)}, but the "
                f"context is {self.context}: limit it to max_completion_length={self.completion}."
            )
        if len(completion_ids) > self.completion:
            raise ValueError(
                f"{backend} generated {len(completion_ids)} tokens, but `max_completion_length={self.completion}`: "
                "limit it to that, or raise the option."
            )
        where = f"A completion of {backend}"
        if (smallest := min(completion_ids, default=0)) < 0:
            raise ValueError(f"{where} contains the token id {smallest}: expected ids of at least 0, without padding.")
        self.check_known(max(completion_ids, default=0), where)

    def check_known(self, largest_id: int, where: str) -> None:
        """Raises `ValueError` when the largest token id of a text is outside the vocabulary."""
        if largest_id >= self.vocabulary:
            raise ValueError(
                f"{where} contains the token id {largest_id}, but the models have {self.vocabulary} ids: use the "
                "tokenizer the student was trained with; after `tokenizer.add_tokens`, resize both models with "
                "`model.resize_token_embeddings(len(tokenizer))`."
            )


Row: TypeAlias = Mapping[str, Any]

TEMPLATE = "{prompt}\n\n{privileged_context}"
"""The template for messages, as in TRL's self-distillation trainers."""

TEXT_TEMPLATE = "{privileged_context}\n\n{prompt}"
"""The template for text: a prompt ends where its answer begins, as in "Q: 1+1? A:", so nothing may follow it."""

PRIVILEGED = ("teacher_prompt", "privileged_context")
"""The columns that give a teacher a prompt other than the student's; a row has at most one of them."""

COLUMNS = ("prompt", *PRIVILEGED, "teacher")
"""The columns that are read from a dataset; all but the first are optional."""


def check_template(option: str, template: Any) -> None:
    """Raises `ValueError` unless a template is `None`, or has both placeholders and nothing else in braces."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template or "") if name is not None}
        found = f"has the placeholders {sorted(names)}"
    except (TypeError, ValueError) as error:
        names, found = set(), f"is no template ({error})"
    if template is not None and names != {"prompt", "privileged_context"}:
        raise ValueError(
            f"`{option}={template!r}` {found}: expected text with exactly `{{prompt}}` and `{{privileged_context}}`, "
            "and all other braces doubled."
        )


def check_prompt_fn(function: Any) -> None:
    """Refuses a `teacher_prompt_fn` that cannot be called with a row and the text of a completion (`TypeError`)."""
    expected = "expected a function of two arguments, the row as a dict and the text of the completion"
    if not callable(function) or isinstance(function, type):
        what = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        raise TypeError(f"`teacher_prompt_fn` is {what}: {expected}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise TypeError(f"`teacher_prompt_fn` is asynchronous, but would not be awaited: {expected}.")
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise TypeError(f"`teacher_prompt_fn` has another signature ({error}): {expected}.") from None
    except ValueError:  # built-in functions may have no signature
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """Builds the teacher's prompt from a row, and with `prompt_fn` also from the completion."""

    template: str | None = None
    """Joins `prompt` and `privileged_context`; when `None`, [`TEMPLATE`] in messages and [`TEXT_TEMPLATE`] in text."""
    prompt_fn: Callable[[dict[str, Any], str], Any] | None = None
    """Builds the prompt from a row and the completion's text; takes precedence over the columns."""

    @property
    def copies(self) -> int:
        """How often `template` repeats its contents."""
        return max((self.template or TEMPLATE).count("{" + name + "}") for name in ("prompt", "privileged_context"))

    def in_row(self, columns: Iterable[str]) -> bool:
        """Whether the columns give the teacher a prompt other than the student's."""
        return not set(PRIVILEGED).isdisjoint(columns)

    def of(self, row: Row, where: str, completion_text: str | None = None) -> Prompt:
        """The teacher's prompt, checked; without the completion's text, `prompt_fn` is not called."""
        if self.prompt_fn is not None and completion_text is not None:
            prompt, source = self._called(dict(row), completion_text, where), "What `teacher_prompt_fn` returned for"
        elif "teacher_prompt" in row and "privileged_context" in row and self.prompt_fn is None:
            raise ValueError(
                f"{where} has both 'teacher_prompt' and 'privileged_context', but the teacher uses only one: remove "
                "the other column."
            )
        elif "teacher_prompt" in row:
            prompt, source = row["teacher_prompt"], "The teacher_prompt in"
        elif "privileged_context" in row:
            prompt = self._with_context(row["prompt"], row["privileged_context"], where)
            source = "The teacher's prompt in"
        else:
            prompt, source = row["prompt"], "The prompt in"
        return Prompt.of(prompt, f"{source} {where}")

    def _called(self, row: dict[str, Any], completion_text: str, where: str) -> Any:
        assert self.prompt_fn is not None, "there is one"
        try:
            return self.prompt_fn(row, completion_text)
        except Exception as error:
            # The user's own exception goes on, with the row named.
            error.add_note(f"`teacher_prompt_fn` raised this for {where}, with the columns {sorted(row)}.")
            raise

    def _with_context(self, prompt: Any, context: Any, where: str) -> Any:
        kind = check_prompt(prompt, f"The prompt in {where}")
        context = _as_text(context, where)
        if not context:
            raise ValueError(
                f"The privileged_context in {where} is empty: add context that the student does not see, or remove "
                "the row."
            )
        if kind == "text":
            return (self.template or TEXT_TEMPLATE).format(prompt=prompt, privileged_context=context)
        # The context goes to the last user message, which the answer follows.
        users = [position for position, message in enumerate(prompt) if message["role"] == "user"]
        if not users:
            raise ValueError(
                f"The prompt in {where} has no user message to which `teacher_prompt_template` could add the "
                "privileged context: add one, or give a complete 'teacher_prompt' instead."
            )
        message = prompt[users[-1]]
        text = (self.template or TEMPLATE).format(prompt=_text_of(message), privileged_context=context)
        content = text if isinstance(message["content"], str) else [{"type": "text", "text": text}]
        return [*prompt[: users[-1]], {**message, "content": content}, *prompt[users[-1] + 1 :]]


def _as_text(context: Any, where: str) -> str:
    """The privileged context as text; contents of messages are joined by newlines, as in TRL."""
    if isinstance(context, str):
        return context
    if isinstance(context, int | float) and not isinstance(context, bool):
        return str(context)
    where = f"The privileged_context in {where}"
    if not isinstance(context, list):
        kind = "None" if context is None else f"of type {type(context).__name__}"
        raise TypeError(f"{where} is {kind}: expected text, a number or messages; fill in or remove the row.")
    check_prompt(context, where)
    return "\n".join(filter(None, map(_text_of, context)))


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content or ())


def teacher_of(row: Row, where: str, names: Collection[str]) -> str:
    """The name of a row's teacher; a single teacher scores every row, whatever its column `teacher`."""
    if len(names) == 1:
        return next(iter(names))
    name = row.get("teacher")
    if not isinstance(name, str) or name not in names:
        found = (
            f"names the teacher {name!r}" if isinstance(name, str) else "has no teacher name in the column 'teacher'"
        )
        raise ValueError(f"{where} {found}: expected one of {sorted(names)}.")
    return name
