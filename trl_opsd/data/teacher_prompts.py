"""Says what the teacher reads before a completion: the student's prompt, or what the student may not see.

It makes text and messages out of dataset rows; tokens are the tokenizer's business.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from trl_opsd.data.prompts import Prompt, check_prompt

Row: TypeAlias = Mapping[str, Any]

TEMPLATE = "{prompt}\n\n{privileged_context}"
"""How TRL's self-distillation trainers join the two."""

COLUMNS = ("prompt", "teacher_prompt", "privileged_context", "teacher")
"""What is read of a dataset: the prompt, and what it may say about the teacher."""


def check_template(template: Any) -> None:
    """Raises `ValueError` unless a template has both placeholders, and nothing else in braces."""
    expected = "expected text with `{prompt}` and `{privileged_context}`, and other braces doubled"
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except (TypeError, ValueError) as error:
        raise ValueError(f"`teacher_prompt_template={template!r}`: {expected} ({error}).") from None
    for name in ("prompt", "privileged_context"):
        if name not in names:
            raise ValueError(f"`teacher_prompt_template={template!r}` has no `{{{name}}}`: {expected}.")
    if others := names - {"prompt", "privileged_context"}:
        raise ValueError(f"`teacher_prompt_template={template!r}` has {sorted(others)} in braces: {expected}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """Builds what the teacher reads out of a row, and out of the completion if somebody asks for that."""

    template: str = TEMPLATE
    """Joins `prompt` and `privileged_context`."""
    prompt_fn: Callable[[dict[str, Any], str], Any] | None = None
    """Makes the prompt out of a row and the text of the completion; goes before the columns."""

    def in_row(self, columns: Iterable[str]) -> bool:
        """Whether the columns give the teacher something else to read than the student."""
        return not {"teacher_prompt", "privileged_context"}.isdisjoint(columns)

    def of(self, row: Row, where: str, completion_text: str | None = None) -> Prompt:
        """The prompt, checked.

        Args:
            row (`Mapping[str, Any]`):
                The dataset row.
            where (`str`):
                Its name, for messages: `"row 3 of train_dataset"`.
            completion_text (`str`, *optional*):
                What the student wrote. When `None`, `prompt_fn` is left alone.

        Raises:
            ValueError: There is nothing to read, or no user message to add the privileged context to.
            TypeError: It is neither text nor messages.
        """
        if self.prompt_fn is not None and completion_text is not None:
            prompt, source = self.prompt_fn(dict(row), completion_text), "What `teacher_prompt_fn` made of"
        elif "teacher_prompt" in row and "privileged_context" in row and self.prompt_fn is None:
            raise ValueError(
                f"{where} has a 'teacher_prompt' and a 'privileged_context', and the teacher reads one of them: remove "
                "the other column."
            )
        elif "teacher_prompt" in row:
            prompt, source = row["teacher_prompt"], "The teacher_prompt in"
        elif "privileged_context" in row:
            prompt, source = self._with_context(row["prompt"], row["privileged_context"], where), "The prompt in"
        else:
            prompt, source = row["prompt"], "The prompt in"
        return Prompt.of(prompt, f"{source} {where}")

    def _with_context(self, prompt: Any, context: Any, where: str) -> Any:
        kind = check_prompt(prompt, f"The prompt in {where}")
        context = _as_text(context, where)
        if not context:
            raise ValueError(
                f"The privileged_context in {where} is empty: tell the teacher what the student does not see, or "
                "remove the row."
            )
        if kind == "text":
            return self.template.format(prompt=prompt, privileged_context=context)
        users = [position for position, message in enumerate(prompt) if message["role"] == "user"]
        if not users:
            raise ValueError(
                f"The prompt in {where} has no user message, which `teacher_prompt_template` could add the privileged "
                "context to: add one, or write out a 'teacher_prompt' instead."
            )
        message = prompt[users[-1]]
        text = self.template.format(prompt=_text_of(message), privileged_context=context)
        content = text if isinstance(message["content"], str) else [{"type": "text", "text": text}]
        return [*prompt[: users[-1]], {**message, "content": content}, *prompt[users[-1] + 1 :]]


def _as_text(context: Any, where: str) -> str:
    """The privileged context as text; of messages, their contents line by line, as TRL joins them."""
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
    """The name of a row's own teacher.

    Args:
        row (`Mapping[str, Any]`):
            The dataset row.
        where (`str`):
            Its name, for the message.
        names (`Collection[str]`):
            All teachers. A single one teaches every row, whatever the row says.

    Raises:
        ValueError: The row names none of them.
    """
    if len(names) == 1:
        return next(iter(names))
    name = row.get("teacher")
    if not isinstance(name, str) or name not in names:
        found = f"names the teacher {name!r}" if isinstance(name, str) else "names no teacher in the column 'teacher'"
        raise ValueError(f"{where} {found}: expected one of {sorted(names)}.")
    return name
