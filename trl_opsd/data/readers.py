"""From a row to a request: its prompt as token ids for the student, and that of its teacher."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.logging import get_logger
from jinja2 import TemplateError
from tokenizers import models
from transformers import PreTrainedTokenizerBase

from trl_opsd.data.prompts import (
    Prompt,
    PromptLimits,
    Row,
    TeacherPrompts,
    check_columns,
    check_no_images,
    common_kind,
    teacher_of,
)
from trl_opsd.data.tokenization import added_at_end, check_parts

_SPACE = "▁"
"""SentencePiece's symbol for a space."""


def at_most_one_token_per_byte(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text that is not blank has at least one token, and at most one for each UTF-8 byte after NFC."""
    # True of BPE over bytes or characters (Qwen, Llama, Gemma, Mistral, GPT) unless text is rewritten first. Each of
    # these may add one token to a whole text.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model) is not models.BPE:
        return False
    try:
        normalizers, splitters = [*_steps(backend.normalizer)], [*_steps(backend.pre_tokenizer)]
    except Exception:  # steps in Python have no state; the library raises a bare `Exception`
        return False
    short_space = backend.token_to_id(_SPACE) is not None
    rewrites = any(not _is_harmless(step, short_space) for step in normalizers)
    # Without a fallback, characters outside the vocabulary vanish, and a text may have no token at all.
    knows_all = backend.model.byte_fallback or backend.model.unk_token is not None
    by_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    # SentencePiece writes a space as a character of three bytes: unless that is one token, a space may become three.
    spaces_grow = any(step["type"] == "Metaspace" for step in splitters) and not short_space
    return (by_bytes or knows_all) and not rewrites and not spaces_grow


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, or of each in a sequence of them."""
    if part is not None:
        state = json.loads(part.__getstate__())
        yield from _flat(state)


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] == "Sequence":
        for step in state.get("normalizers") or state.get("pretokenizers") or ():
            yield from _flat(step)
    else:
        yield state


def _is_harmless(step: dict[str, Any], short_space: bool) -> bool:
    if step["type"] == "Replace":
        return step["pattern"] == {"String": " "} and step["content"] == _SPACE and short_space
    return step["type"] == "NFC" or (step["type"] == "Prepend" and step["prepend"] == _SPACE)


class Request(dict[str, Any]):
    """A dataset row, parsed; its columns are the keys."""

    __slots__ = ("advantage", "is_off_policy", "logprobs", "of_teacher", "place", "student", "teacher", "where")

    def __init__(self, row: Row, where: str, student: Prompt, teacher: str, of_teacher: Prompt) -> None:
        super().__init__(row)
        # `of_teacher` is the teacher's prompt from the columns, which `teacher_prompt_fn` replaces after the rollout.
        self.where, self.student, self.teacher, self.of_teacher = where, student, teacher, of_teacher
        self.place: int | None = None  # index in the generation batch over all processes
        self.is_off_policy: bool | None = None  # whether the completion is the dataset's; `None` until decided
        self.logprobs: tuple[list[int], list[float]] | None = None  # a completion, and its tokens' log-probabilities
        self.advantage = 0.0  # of the completion within its group, once there are rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Parses rows, without a tokenizer."""

    teachers: tuple[str, ...]
    """Names of the teachers."""
    prompts: TeacherPrompts
    """Builds the teachers' prompts."""

    def read(self, row: Row, where: str) -> Request:
        """Parses one row and checks its columns, teacher and prompts; a parsed row is returned unchanged."""
        if isinstance(row, Request):
            return row
        check_no_images(row, where)
        check_columns(row, where, self.teachers if len(self.teachers) > 1 else (), features=row)
        teacher = teacher_of(row, where, self.teachers)
        student = Prompt.of(row["prompt"], f"The prompt in {where}")
        # `teacher_prompt_fn` takes precedence over the columns, but needs the completion.
        in_row = self.prompts.prompt_fn is None and self.prompts.in_row(row)
        return Request(row, where, student, teacher, self.prompts.of(row, where) if in_row else student)

    def read_batch(self, rows: Iterable[Row], batch: str) -> list[Request]:
        """Parses the rows of a generation batch of this name."""
        return [self.read(row, f"row {number} of {batch}") for number, row in enumerate(rows)]


logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Tokenizes and checks the prompts of the student, or of the teachers."""

    intake: Intake
    """Parses the rows."""
    prompt_of: Callable[[Request], Prompt]
    """Selects the prompt of a row."""
    tokenize: Callable[[list[Any]], list[list[int]]]
    """Turns prompts of one kind into token ids, chat template included."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer inside `tokenize`."""
    largest_id: int
    """Its largest token id."""
    settings: tuple[Any, ...]
    """Everything else that token ids depend on; equal in runs with equal options."""
    limits: Mapping[str, PromptLimits]
    """Limits of the prompts, by the name of the row's teacher."""
    columns: tuple[str, ...] = ("prompt",)
    """Columns that prompts are built from."""
    copies: int = 1
    """How often a prompt may repeat the text of the columns."""
    is_needed: Callable[[list[str] | None], bool] = lambda columns: True
    """Whether rows with these columns need checking; `None` for unknown columns."""

    def limits_of(self, request: Request) -> PromptLimits:
        """Limits of the prompt of a row."""
        return self.limits[request.teacher]

    @property
    def strictest(self) -> PromptLimits:
        """Limits within which a prompt is within those of every row."""
        limits = list(self.limits.values())
        contexts = [one.context for one in limits if one.context is not None]
        return PromptLimits(
            vocabulary=min(one.vocabulary for one in limits),
            context=min(contexts, default=None),
            # The longest completion leaves the least room for a prompt.
            completion=max(one.completion for one in limits),
        )

    @property
    def knows_all_ids(self) -> bool:
        """Whether the models know every token id of the tokenizer."""
        return self.largest_id < self.strictest.vocabulary

    @property
    def is_bounded(self) -> bool:
        """Whether a prompt has at most one token for each byte, and only tokens that the models know."""
        return self.knows_all_ids and at_most_one_token_per_byte(self.tokenizer)

    def check_kind(self, prompts: Sequence[Prompt], kind: str | None = None) -> str | None:
        """The common kind of these prompts and of those before; refuses kinds that this tokenizer cannot complete."""
        kind = common_kind(prompts, kind)
        if kind == "messages" and not self.tokenizer.chat_template:
            raise ValueError(
                f"{prompts[0].where} is a list of messages, but the tokenizer has no chat template: set "
                "`tokenizer.chat_template`, or give the prompts as text."
            )
        if kind == "text" and (added := added_at_end(self.tokenizer)):
            raise ValueError(
                f"{prompts[0].where} is text, to which the tokenizer appends {added!r}, so the completion would follow "
                "an end token: give messages, load the tokenizer with `add_eos_token=False`, or set "
                "`tokenizer.backend_tokenizer.post_processor` to one that appends nothing."
            )
        return kind

    def token_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of prompts whose kind was checked; refuses what the chat template refuses or prints."""
        try:
            found = self.tokenize([prompt.value for prompt in prompts])
        except (TemplateError, TypeError) as error:  # a TypeError where content parts are joined as text
            if len(prompts) > 1:  # one by one, to find the row
                return [ids for prompt in prompts for ids in self.token_ids([prompt])]
            raise ValueError(f"{prompts[0].where}: the tokenizer's chat template rejects it: {error}.") from error
        for prompt, ids in zip(prompts, found, strict=True):
            self.check_start(ids, prompt.where)
            if prompt.has_parts:
                check_parts(prompt.value, self.tokenizer.decode(ids), prompt.where)
        return found

    def check_start(self, prompt_ids: list[int], where: str) -> None:
        """Raises `ValueError` when a prompt has two start tokens."""
        start = self.tokenizer.bos_token_id
        if start is not None and prompt_ids[:2] == [start, start]:
            raise ValueError(
                f"{where} has two start tokens {self.tokenizer.bos_token!r}, one in the text and one added by the "
                "tokenizer: remove it from the text, or give messages."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The readers of student and teachers."""

    intake: Intake
    """Parses the rows."""
    tokenize: Callable[..., list[list[int]]]
    """Turns prompts of one kind into token ids; takes chat template arguments."""
    template: Mapping[str, Any]
    """Chat template arguments that differ for the teacher."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer inside `tokenize`."""
    largest_id: int
    """Its largest token id, kept because a large vocabulary takes long to search."""
    settings: tuple[Any, ...]
    """The chat template arguments of both, and whatever else `tokenize` depends on."""
    student_limits: PromptLimits
    """Limits of the student's prompts."""
    teacher_limits: Mapping[str, PromptLimits] = field(default_factory=dict)
    """Limits of each teacher's prompts, by its name."""

    @property
    def student(self) -> Reader:
        """The student's reader."""
        return Reader(
            intake=self.intake,
            prompt_of=lambda request: request.student,
            tokenize=self.tokenize,
            tokenizer=self.tokenizer,
            largest_id=self.largest_id,
            settings=self.settings,
            limits=dict.fromkeys(self.intake.teachers, self.student_limits),
        )

    @property
    def teacher(self) -> Reader:
        """The teachers' reader, for prompts from the columns; `teacher_prompt_fn` needs a completion."""
        return Reader(
            intake=self.intake,
            prompt_of=lambda request: request.of_teacher,
            tokenize=self._tokenize_for_teacher,
            tokenizer=self.tokenizer,
            largest_id=self.largest_id,
            settings=(*self.settings, dict(self.template), self.intake.prompts.template),
            limits=self.teacher_limits,
            columns=("prompt", "teacher_prompt", "privileged_context"),
            copies=self.intake.prompts.copies,
            is_needed=self._may_differ,
        )

    def with_teachers(self, vocabulary: int | None, contexts: Mapping[str, int | None]) -> Readers:
        """A copy with the limits of the loaded teachers: their contexts, and the shared vocabulary or `None`."""
        # The student's prompts too may only have ids that all models know.
        limits = replace(self.student_limits, vocabulary=vocabulary or self.student_limits.vocabulary)
        theirs = {
            name: replace(
                limits, context=context, reader=f"the teacher {name!r}" if len(contexts) > 1 else "the teacher"
            )
            for name, context in contexts.items()
        }
        for one in theirs.values():
            one.check_room()
        return replace(self, student_limits=limits, teacher_limits=theirs)

    def bounded_by_teacher(self, columns: Iterable[str]) -> Readers:
        """A copy whose student context is at most the teacher's, if one teacher scores the student's own prompts."""
        # With tools, a conversation grows until the context is full.
        if len(self.teacher_limits) > 1 or not self.are_alike(columns):
            return self
        limits = [one for one in (self.student_limits, *self.teacher_limits.values()) if one.context is not None]
        if not limits:
            return self
        least = min(limits, key=lambda one: one.context or 0)
        return replace(self, student_limits=replace(self.student_limits, context=least.context, reader=least.reader))

    def read_batch(self, rows: Iterable[Mapping[str, Any]], batch: str) -> list[Request]:
        """Parses the rows of a generation batch of this name, whose prompts must be of one kind."""
        requests = self.intake.read_batch(rows, batch)
        self.student.check_kind([request.student for request in requests])
        return requests

    def check_batch(self, prompt_ids: Sequence[list[int]], batch: str) -> None:
        """Raises `ValueError` when a prompt of a generation batch of this name exceeds the student's limits."""
        student = self.student
        for number, ids in enumerate(prompt_ids):
            where = f"The prompt in row {number} of {batch}"
            self.student_limits.check(len(ids), max(ids, default=0), where)
            student.check_start(ids, where)

    def are_alike(self, columns: Iterable[str]) -> bool:
        """Whether the teacher gets the same prompts as the student."""
        prompts = self.intake.prompts
        return not self.template and prompts.prompt_fn is None and not prompts.in_row(columns)

    def _may_differ(self, columns: Iterable[str] | None) -> bool:
        """Whether rows that fit the student may not fit a teacher, as far as known before training."""
        if self.intake.prompts.prompt_fn is not None:
            return False
        covered = all(limits.covers(self.student_limits) for limits in self.teacher_limits.values())
        return columns is None or not covered or not self.are_alike(columns)

    def teacher_prompt_ids(
        self,
        requests: Sequence[Request],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        decode: Callable[..., list[str]],
    ) -> list[list[int]] | None:
        """The teachers' prompts before these completions, as token ids; `None` if they are the student's prompts."""
        # Where no row differs, the student's token ids are reused and nothing is tokenized again.
        alike = all(map(self.are_alike, requests))
        if not alike:
            reader = self.teacher
            prompts = self._teacher_prompts(requests, completion_ids, decode)
            if reader.check_kind(prompts) == "text" and requests[0].student.kind == "messages":
                logger.warning_once(
                    "The prompts are text for the teacher but messages for the student, so no chat template is applied "
                    "to the teacher's. If the teacher is a chat model, give it messages, too."
                )
            prompt_ids = reader.token_ids(prompts)
        self._check_fits_teacher(requests, prompt_ids, list(map(len, completion_ids)))
        return None if alike else prompt_ids

    def _teacher_prompts(
        self, requests: Sequence[Request], completion_ids: list[list[int]], decode: Callable[..., list[str]]
    ) -> list[Prompt]:
        of = self.intake.prompts
        if of.prompt_fn is None:
            return [request.of_teacher for request in requests]
        texts = decode(completion_ids, skip_special_tokens=True)
        return [of.of(request, request.where, text) for request, text in zip(requests, texts, strict=True)]

    def _check_fits_teacher(
        self, requests: Sequence[Request], prompt_ids: Sequence[list[int]], completion_lengths: Sequence[int]
    ) -> None:
        """Checks that each prompt and its completion fit into the context of the row's teacher."""
        for request, ids, length in zip(requests, prompt_ids, completion_lengths, strict=True):
            limits = self.teacher_limits[request.teacher]
            if limits.context is not None and len(ids) + length > limits.context:
                raise ValueError(
                    f"The teacher's input for {request.where} has {len(ids)} prompt tokens and {length} completion "
                    f"tokens, but its context is {limits.context} tokens: shorten its prompt, or the output of tools."
                )
            # The completion is known by now, so no room has to be kept for it.
            replace(limits, completion=0).check(
                len(ids), max(ids, default=0), f"The teacher's input for {request.where}"
            )

    def _tokenize_for_teacher(self, prompts: list[Any]) -> list[list[int]]:
        if self.template and isinstance(prompts[0], str):
            raise ValueError(
                f"`teacher_chat_template_kwargs={dict(self.template)!r}` has no effect, because the teacher's prompts "
                "are text: give messages, or remove the option."
            )
        return self.tokenize(prompts, **self.template)
