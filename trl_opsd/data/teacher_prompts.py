"""Builds the teacher's prompt: the student's own, or one with context that the student does not see.

It turns dataset rows into text and messages; tokenization happens elsewhere.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from trl_opsd.data.prompts import Prompt, check_prompt

Row: TypeAlias = Mapping[str, Any]

TEMPLATE = "{prompt}\n\n{privileged_context}"
"""The template for messages, as in TRL's self-distillation trainers."""

TEXT_TEMPLATE = "{privileged_context}\n\n{prompt}"
"""The template for text: a prompt ends where its answer begins, as in "Q: 1+1? A:", so nothing may follow it."""

PRIVILEGED = ("teacher_prompt", "privileged_context")
"""The columns that give a teacher a prompt other than the student's; a row has at most one of them."""

COLUMNS = ("prompt", *PRIVILEGED, "teacher")
"""The columns that are read from a dataset; all but the first are optional."""


def check_template(template: Any) -> None:
    """Raises `ValueError` unless a template is `None`, or has both placeholders and nothing else in braces."""
    if template is None:
        return
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


def check_prompt_fn(function: Any) -> None:
    """Refuses a `teacher_prompt_fn` that cannot be called with a row and the text of a completion (`TypeError`)."""
    expected = "expected a function of two arguments, the row as a dict and the text of the completion"
    if not callable(function) or isinstance(function, type):
        what = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        raise TypeError(f"`teacher_prompt_fn` is {what}: {expected}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise TypeError(f"`teacher_prompt_fn` is asynchronous, and nothing would await it: {expected}.")
    try:
        inspect.signature(function).bind({}, "")
    except TypeError as error:
        raise TypeError(f"`teacher_prompt_fn` takes other arguments ({error}): {expected}.") from None
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
                f"{where} has both a 'teacher_prompt' and a 'privileged_context', but the teacher reads only one of "
                "them: remove the other column."
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
            error.add_note(f"`teacher_prompt_fn` raised this for {where}, which has the columns {sorted(row)}.")
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
                f"The prompt in {where} has no user message for `teacher_prompt_template` to add the privileged "
                "context to: add one, or give a complete 'teacher_prompt' instead."
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
        found = f"names the teacher {name!r}" if isinstance(name, str) else "names no teacher in the column 'teacher'"
        raise ValueError(f"{where} {found}: expected one of {sorted(names)}.")
    return name
