"""The prompts of a dataset row, for the student and for its teacher: their format, and the teacher's context.

`where` is the name of a row or prompt in messages: `"row 3 of train_dataset"`. Messages have the type of an invalid
value, but never its contents, which may be confidential.
It turns dataset rows into text and messages; tokenization happens elsewhere.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import cycle
from typing import Any, TypeAlias

from trl_opsd.data.images import IMAGE_COLUMNS, TEACHER_IMAGE_COLUMNS, filled, free, images_in, places


def check_columns(columns: Iterable[str] | None, where: str, optional: Collection[str] = ()) -> None:
    """Refuses columns without `prompt`, or with a misspelt optional one, which would be ignored."""
    if columns is None:  # not known before the first row is read
        return
    names = list(columns)
    if "prompt" not in names:
        raise ValueError(
            f"{where} has no column 'prompt', only {names}: rename the column that holds the prompts, for instance "
            f"`dataset.rename_column({[*names, 'question'][0]!r}, 'prompt')`."
        )
    for name in names if optional else ():
        (meant,) = get_close_matches(name.lower(), optional, n=1, cutoff=0.85) or [name]
        if meant not in names:
            raise ValueError(f"{where} has an unknown column {name!r}; did you mean {meant!r}? Rename it.")


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
    processor: str = ""
    """The name of the teacher whose own processor reads its images; empty for the student's processor."""
    environment: str = ""
    """The one of several environments whose tools the template describes; empty where all rows have the same tools."""
    has_images: bool = False
    """Whether a model's processor has to read it."""
    template: Mapping[str, bool] = field(default_factory=dict)
    """Arguments of the chat template where the last message is the assistant's, which goes on with it."""

    @property
    def texts(self) -> list[str]:
        """Its text, or the texts of its messages."""
        if self.kind == "text":
            return [self.value]
        return [one["content"] for one in self.value if isinstance(one["content"], str)]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Names the prompt in an error of the body."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def begun(self, beginning: Any) -> Prompt:
        """It and the beginning of a completion, text or messages, as one prompt; `None` adds nothing."""
        if self.kind == "messages" and isinstance(beginning, str):
            beginning = [{"role": "assistant", "content": beginning}]
        if type(beginning) is not type(self.value):
            return self
        whole = Prompt.of(self.value + beginning, f"{self.where}, with its {PREFIX},")
        return replace(self, value=whole.value, where=whole.where, template=whole.template)

    @classmethod
    def of(cls, value: Any, where: str) -> Prompt:
        """Checks a prompt."""
        kind = check_prompt(value, where)
        if kind == "text":
            return cls(value, kind, where)
        goes_on = value[-1]["role"] == "assistant" and not value[-1].get("tool_calls")
        template = {"continue_final_message": True, "add_generation_prompt": False} if goes_on else {}
        return cls(tidy(value, where), kind, where, has_images=bool(places(value)), template=template)


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
        raise ValueError(f"{where} is {found}: expected a dict with 'role' and 'content'.")
    content = message["content"]
    # A call of tools may stand in place of content.
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, str):
        return
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type") for part in content}
        if kinds <= {"text", "image"}:
            return
        raise ValueError(
            f"{where} has parts of type {sorted(map(str, kinds - {'text', 'image'}))}: expected 'text' or 'image'; "
            "videos and audio are not supported."
        )
    raise ValueError(f"{where}: its content is {_kind(content)}: expected text.")


def tidy(messages: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Messages as chat templates read them: without what a table has filled with `None`, with the arguments of calls as
    objects, and with the name of a tool that answers by the id of a call, as in OpenAI's form.

    Raises:
        ValueError: A tool answers though nothing has called it, or the arguments of a call are no JSON.
    """
    found, names, is_called = list[dict[str, Any]](), dict[str, str](), False
    for number, message in enumerate(messages):
        # Some templates write the word `None`, or fail, where a call stands in place of content.
        one = {"content": "", **{name: value for name, value in message.items() if value is not None}}
        if calls := one.pop("tool_calls", None):
            one["tool_calls"] = [_called(call, f"{where}: message {number}") for call in calls]
            names |= {call["id"]: call.get("function", call)["name"] for call in one["tool_calls"] if "id" in call}
        if one["role"] == "tool":
            if not is_called:
                raise ValueError(
                    f"{where}: message {number} is of a tool, but the message of the assistant before it has no "
                    "'tool_calls': add them, or remove it."
                )
            if one.get("tool_call_id") in names:
                one.setdefault("name", names[one["tool_call_id"]])
        else:
            is_called = bool(calls)
        found.append(one)
    return found


def _called(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = _without_none(call)
    of = found.get("function", found)
    if isinstance(of.get("arguments"), str):
        try:
            of["arguments"] = json.loads(of["arguments"])
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: the arguments of a call are text that is no JSON ({error}).") from error
    return found


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


Row: TypeAlias = Mapping[str, Any]

TEMPLATE = "{prompt}\n\n{privileged_context}"
"""The template for messages, as in TRL's self-distillation trainers."""

TEXT_TEMPLATE = "{privileged_context}\n\n{prompt}"
"""The template for text: a prompt ends where its answer begins, as in "Q: 1+1? A:", so nothing may follow it."""

SUCCESS_TEMPLATE = "{prompt}\n\nA correct solution:\n\n{privileged_context}\n\nNow solve it yourself."
"""The template for a successful completion of the same prompt."""

PRIVILEGED = ("teacher_prompt", "privileged_context")
"""The columns that give a teacher a prompt other than the student's; a row has at most one of them."""

CONTRAST = ("contrast_prompt", "contrast_context")
"""Those that give the prompt of a contrast, with the method `contrast`; a row has one of them."""

PREFIX = "completion_prefix"
"""The column with the beginning of a completion, which the student goes on with; `None` where there is none."""

COLUMNS = ("prompt", PREFIX, *PRIVILEGED, *CONTRAST, "teacher", *IMAGE_COLUMNS, *TEACHER_IMAGE_COLUMNS)
"""The columns that are read from a dataset; all but the first are optional."""


def check_template(option: str, template: Any, names: Collection[str] = ("prompt", "privileged_context")) -> None:
    """Raises `ValueError` unless a template is `None`, or has all placeholders and nothing else in braces."""
    try:
        used = {name for _, name, _, _ in string.Formatter().parse(template or "") if name is not None}
        found = f"has the placeholders {sorted(used)}"
    except (TypeError, ValueError) as error:
        used, found = set(), f"is no template ({error})"
    if template is not None and used != {*names}:
        wanted = " and ".join(f"`{{{name}}}`" for name in names)
        raise ValueError(
            f"`{option}={template!r}` {found}: expected text with exactly {wanted}, and all other braces doubled."
        )


def tells_more(columns: Iterable[str]) -> bool:
    """Whether the columns give the teacher a prompt other than the student's."""
    return not {*PRIVILEGED, *TEACHER_IMAGE_COLUMNS}.isdisjoint(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Request(Mapping[str, Any]):
    """A dataset row, parsed; its columns are the keys."""

    columns: Row
    where: str
    student: Prompt
    teacher: str
    """The name of its teacher."""
    of_teacher: Prompt
    """The teacher's prompt from the columns, which `teacher_prompt_fn` replaces after the rollout."""
    contrast: Prompt | None = None
    """The teacher's prompt that its target moves away from."""

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def tells_more(self) -> bool:
        """Whether the teacher's prompt from the columns is another one than the student's."""
        return self.of_teacher is not self.student


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Parses rows, without a tokenizer, and builds the teachers' prompts."""

    teachers: tuple[str, ...]
    """Names of the teachers."""
    template: str | None
    """Joins `prompt` and `privileged_context`; when `None`, [`TEMPLATE`] in messages and [`TEXT_TEMPLATE`] in text."""
    prompt_fn: Callable[..., Any] | None
    """Builds a teacher's prompt from a row and the completion's text; takes precedence over the columns."""
    rewrites: bool = False
    """Whether teachers' prompts depend on completions."""
    contrasts: bool = False
    """Whether rows have the prompt of a contrast."""
    environments: frozenset[str] = frozenset()
    """Names of several environments; each row names one."""
    is_told: bool = False
    """Whether environments tell what only a teacher reads."""
    needs_context: bool = False
    """Whether a row counts only where the teacher reads something that the student does not."""
    processors: Mapping[str, str | None] = field(default_factory=dict)
    """Who reads images with which processor, once that is known: the student under an empty name, and teachers that do
    not have its processor; `None` for one that reads text only."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns whose values decide how a row is read."""
        return (*(("teacher",) if len(self.teachers) > 1 else ()), *(("environment",) if self.environments else ()))

    @property
    def copies(self) -> int:
        """How often `template` repeats its contents."""
        return max((self.template or TEMPLATE).count("{" + name + "}") for name in ("prompt", "privileged_context"))

    def read(self, row: Row, where: str) -> Request:
        """Parses one row and checks its columns, teacher and prompts; a parsed row is returned unchanged."""
        if isinstance(row, Request):
            return row
        check_columns(row, where)
        teacher = self._teacher_of(row, where)
        named = f"The prompt in {where}"
        prompt = Prompt.of(row["prompt"], named)
        images = None if row.keys().isdisjoint(IMAGE_COLUMNS) else images_in(row, IMAGE_COLUMNS, where)
        student = self._acting(_seen(prompt, images), row)
        if student.has_images and self.processors.get("", "") is None:
            raise ValueError(
                f"{named} has images, but `processing_class` is a tokenizer: pass the student's processor, "
                "`AutoProcessor.from_pretrained(...)`, and a student that reads images; or remove them."
            )
        request = Request(row, where, student, teacher, self._of_teacher(row, where, teacher, student))
        return replace(request, contrast=self._contrast(request)) if self.contrasts else request

    def _acting(self, prompt: Prompt, row: Row) -> Prompt:
        """A prompt with the tools of its row's environment, if there are several."""
        if not self.environments:
            return prompt
        if (name := row.get("environment")) not in self.environments:
            raise ValueError(
                f"{prompt.where} names the environment {name!r} in the column 'environment': expected one of "
                f"{sorted(self.environments)}."
            )
        return replace(prompt, environment=name)

    def with_feedback(self, request: Request, feedback: str, template: str) -> Request:
        """A row whose teacher also reads what its environment returned after the episode."""
        told, known = template.format(feedback=feedback), request.get("privileged_context")
        row = {**request.columns, "privileged_context": told if known is None else f"{known}\n\n{told}"}
        of_teacher = self._of_teacher(row, request.where, request.teacher, request.student)
        return replace(request, columns=row, of_teacher=of_teacher)

    def read_batch(self, rows: Iterable[Row], batch: str) -> list[Request]:
        """Parses the rows of a generation batch of this name."""
        return [self.read(row, f"row {number} of {batch}") for number, row in enumerate(rows)]

    def prompt_of(self, request: Request, value: Any, where: str) -> Prompt:
        """Text or messages as the prompt of a row's teacher, with its images."""
        return self._acting(self._seen_by(request.teacher, Prompt.of(value, where), request), request)

    def _teacher_of(self, row: Row, where: str) -> str:
        """The name of a row's teacher; a single teacher scores every row, whatever its column `teacher`."""
        if len(self.teachers) == 1:
            return self.teachers[0]
        name = row.get("teacher")
        name = str(name) if isinstance(name, int) else name
        if not isinstance(name, str) or name not in self.teachers:
            raise ValueError(
                f"{where} names the teacher {name!r} in the column 'teacher': expected one of {sorted(self.teachers)}."
            )
        return name

    def _of_teacher(self, row: Row, where: str, teacher: str, student: Prompt) -> Prompt:
        """The teacher's prompt from the columns, the student's own if they do not make it another one."""
        if self.prompt_fn is not None or not (tells_more(row) or (student.has_images and teacher in self.processors)):
            return student
        if "teacher_prompt" in row and "privileged_context" in row:
            raise ValueError(
                f"{where} has both 'teacher_prompt' and 'privileged_context', but the teacher uses only one: remove "
                "the other column."
            )
        value, named = row["prompt"], f"The teacher's prompt in {where}"
        if "teacher_prompt" in row:
            value, named = row["teacher_prompt"], f"The teacher_prompt in {where}"
        elif "privileged_context" in row:
            value = self.with_context(value, row["privileged_context"], where)
        elif teacher not in self.processors and images_in(row, TEACHER_IMAGE_COLUMNS, where) is None:
            return student
        return self._acting(self._seen_by(teacher, Prompt.of(value, named), row), row)

    def _contrast(self, request: Request) -> Prompt:
        whole, context = CONTRAST
        where = request.where
        if (whole in request) == (context in request):
            both = "both" if whole in request else "neither"
            raise ValueError(
                f"{where} has {both} of {whole!r} and {context!r}: with the method `contrast`, give one of them."
            )
        value = request[whole] if whole in request else self.with_context(request["prompt"], request[context], where)
        found = self.prompt_of(request, value, f"The contrast in {where}")
        if not found.has_images and found.value == request.of_teacher.value:
            raise ValueError(
                f"The contrast in {where} is the teacher's own prompt, so nothing would be subtracted: give a context "
                "that lacks what should be learned."
            )
        return found

    def _seen_by(self, teacher: str, prompt: Prompt, row: Row) -> Prompt:
        """A teacher's prompt with the images that it sees: those of its columns or, without, the student's."""
        images, theirs = (images_in(row, names, prompt.where) for names in (IMAGE_COLUMNS, TEACHER_IMAGE_COLUMNS))
        is_written = "teacher_prompt" in row or self.prompt_fn is not None  # for this teacher
        if is_written and prompt.has_images and not free(places(prompt.value)):
            images = None  # it brings its own
        processor = self.processors.get(teacher, self.processors.get("", ""))
        if processor is not None:
            seen = _seen(prompt, images if theirs is None else theirs, theirs is not None)
            return replace(seen, processor=processor) if seen.has_images else seen
        if theirs or prompt.has_images or (images and not is_written):
            raise ValueError(
                f"{prompt.where} has images, but the teacher reads text only: pass its processor as "
                "`teacher_processing_class`, or describe the images in a column 'teacher_prompt'."
            )
        return prompt

    def with_context(self, prompt: Any, context: Any, where: str, template: str | None = None) -> Any:
        """A prompt, text or messages, with context that only the teacher reads; `template` where no option is set."""
        context = _as_text(context, where)
        if not context:
            raise ValueError(
                f"The privileged_context in {where} is empty: add context that the student does not see, or remove "
                "the row."
            )
        if isinstance(prompt, str):
            return (self.template or template or TEXT_TEMPLATE).format(prompt=prompt, privileged_context=context)
        # The context goes to the last user message, which the answer follows.
        users = [position for position, message in enumerate(prompt) if message["role"] == "user"]
        if not users:
            raise ValueError(
                f"The prompt in {where} has no user message to which `teacher_prompt_template` could add the "
                "privileged context: add one, or give a complete 'teacher_prompt' instead."
            )
        message = prompt[users[-1]]
        template = self.template or template or TEMPLATE
        text = template.format(prompt=_text_of(message, _IMAGE), privileged_context=context)
        content: Any = text
        if isinstance(message["content"], list):  # images stay where they are in the text
            images = cycle(places([message]))
            pieces = filter(None, re.split(f"({_IMAGE})", text))
            content = [next(images) if piece == _IMAGE else {"type": "text", "text": piece} for piece in pieces]
        return [*prompt[: users[-1]], {**message, "content": content}, *prompt[users[-1] + 1 :]]


def _as_text(context: Any, where: str) -> str:
    """The privileged context as text; contents of messages are joined by newlines, as in TRL."""
    if isinstance(context, str):
        return context
    if isinstance(context, int | float) and not isinstance(context, bool):
        return str(context)
    where = f"The privileged_context in {where}"
    if not isinstance(context, list):
        raise TypeError(f"{where} is {_kind(context)}: expected text, a number or messages; fill in or remove the row.")
    check_prompt(context, where)
    return "\n".join(filter(None, map(_text_of, context)))


_IMAGE = "\0"
"""Stands for an image in the text of a message."""


def _text_of(message: Mapping[str, Any], image: str = "") -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    parts = [image if part.get("type") == "image" else part.get("text") or "" for part in content or ()]
    return ("" if places([message]) else " ").join(parts)


def _seen(prompt: Prompt, images: list[Any] | None, replaces: bool = False) -> Prompt:
    """A prompt with images in its messages."""
    if prompt.kind == "text":
        if images:
            raise ValueError(
                f"{prompt.where} is text, but the row has images, which belong to a message: give messages, "
                "[{'role': 'user', 'content': '...'}]."
            )
        return prompt
    if not images and not prompt.has_images:
        return prompt
    return replace(prompt, value=filled(prompt.value, images, prompt.where, replaces), has_images=True)
