"""From a row to a request: its prompt as token ids for the student, and that of its teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trl_opsd.data.images import IMAGE_COLUMNS, TEACHER_IMAGE_COLUMNS, tokens_in
from trl_opsd.data.prompts import CONTRAST, PREFIX, PRIVILEGED, Intake, Prompt, Request, common_kind, tells_more
from trl_opsd.data.tokenization import (
    added_at_end,
    at_most_one_token_per_byte,
    check_parts,
    read_alone,
)


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
    remedy: str = "set overlong_prompts='drop' (which does not count text that environments add)"
    """What else helps where a prompt is too long."""

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt of this length leaves room for a whole completion."""
        return self.room(prompt_tokens) == self.completion

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may follow a prompt of this length."""
        return self.completion if self.context is None else min(self.completion, self.context - prompt_tokens)

    def covers(self, other: PromptLimits) -> bool:
        """Whether every prompt within the other limits is within these."""
        # Where a teacher's limits are no stricter in any respect, its prompts need no check of their own.
        wide = self.context is None or (other.context is not None and other.context <= self.context)
        return wide and other.vocabulary <= self.vocabulary and other.completion >= self.completion

    def check(self, prompt_tokens: int, largest_id: int, where: str) -> None:
        """Raises `ValueError` when the prompt is empty, does not fit, or has a token id outside the vocabulary."""
        if not prompt_tokens:
            raise ValueError(f"{where} has no tokens after tokenization: add a prompt, or remove the row.")
        if not self.fits(prompt_tokens):
            raise ValueError(
                f"{where} has {prompt_tokens} tokens; with a completion of {self.completion} this exceeds the context "
                f"of {self.reader} ({self.context} tokens): shorten it, lower max_completion_length, or {self.remedy}."
            )
        self.check_known(largest_id, where)

    def check_completion(self, completion_ids: list[int], backend: str) -> None:
        """Raises `ValueError` when a completion is too long or has token ids outside the vocabulary."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Tokenizes and checks the prompts of the student, or of the teachers."""

    of: Readers
    """What both depend on."""
    is_teachers: bool
    """Whether it reads for the teachers."""
    is_contrast: bool = False
    """Whether it reads the teachers' contrasts."""

    def prompt_of(self, request: Request) -> Prompt:
        """The prompt of a row, a teacher's from the columns."""
        if self.is_contrast and request.contrast is not None:
            return request.contrast
        if not self.is_teachers:
            return request.student
        return self.read_by(request.teacher, request.of_teacher)

    def context_of(self, request: Request) -> Prompt:
        """What is read before a completion, or before what is generated of it."""
        return self.prompt_of(request).begun(request.columns.get(PREFIX))

    def read_by(self, teacher: str, prompt: Prompt) -> Prompt:
        """A prompt that this teacher's tokenizer reads, if it has its own."""
        return replace(prompt, processor=teacher) if teacher in self.of.tokenizers else prompt

    def tokenizer_of(self, prompt: Prompt) -> PreTrainedTokenizerBase:
        """What reads this prompt."""
        return self.of.tokenizers.get(prompt.processor, self.of.tokenizer)

    def limits_of(self, request: Request) -> PromptLimits:
        """Limits of the prompt of a row."""
        return self.of.teacher_limits[request.teacher] if self.is_teachers else self.of.student_limits

    @property
    def strictest(self) -> PromptLimits:
        """Limits within which a prompt is within those of every row."""
        limits = list(self.of.teacher_limits.values()) if self.is_teachers else [self.of.student_limits]
        contexts = [one.context for one in limits if one.context is not None]
        return PromptLimits(
            vocabulary=min(one.vocabulary for one in limits),
            context=min(contexts, default=None),
            # The longest completion leaves the least room for a prompt.
            completion=max(one.completion for one in limits),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether a prompt has at most one token for each byte, and only tokens that the models know."""
        of, read = self.of, {"": (self.of.tokenizer, self.strictest)}
        if self.is_teachers and of.tokenizers:
            read = {name: (one, of.teacher_limits[name]) for name, one in of.tokenizers.items()}
        return all(
            of.largest_ids[name] < limits.vocabulary and at_most_one_token_per_byte(tokenizer)
            for name, (tokenizer, limits) in read.items()
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that prompts are built from."""
        theirs = (*(CONTRAST if self.is_contrast else PRIVILEGED), *TEACHER_IMAGE_COLUMNS) if self.is_teachers else ()
        return ("prompt", PREFIX, *IMAGE_COLUMNS, *theirs)

    @property
    def copies(self) -> int:
        """How often a prompt may repeat the text of the columns."""
        return self.of.intake.copies if self.is_teachers else 1

    def is_needed(self, columns: Iterable[str] | None) -> bool:
        """Whether rows with these columns need checking (`None` if unknown), the student's prompts being checked."""
        if not self.is_teachers or self.of.intake.prompt_fn is not None:
            return not self.is_teachers
        covered = all(limits.covers(self.of.student_limits) for limits in self.of.teacher_limits.values())
        return self.is_contrast or columns is None or not covered or not self.of.are_alike(columns)

    def image_tokens(self, request: Request) -> int | None:
        """Tokens of the images of a row's prompt; `None` if only reading them tells."""
        prompt = self.prompt_of(request)
        if not prompt.has_images:
            return 0
        with prompt.named():
            found = tokens_in(self.of.processors[prompt.processor], prompt.value)
        return found

    def check_kind(self, prompts: Sequence[Prompt], kind: str | None = None) -> str | None:
        """The common kind of these prompts and of those before; refuses kinds that this tokenizer cannot complete."""
        kind = common_kind(prompts, kind)
        for prompt in {one.processor: one for one in reversed(prompts)}.values():
            tokenizer = self.tokenizer_of(prompt)
            if kind == "text" and (added := added_at_end(tokenizer)):
                raise ValueError(
                    f"{prompt.where} is text, to which the tokenizer appends {added!r}, so the completion would follow "
                    "an end token: give messages, load the tokenizer with `add_eos_token=False`, or set "
                    "`tokenizer.backend_tokenizer.post_processor` to one that appends nothing."
                )
        return kind

    def token_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of prompts whose kind was checked; refuses what the chat template refuses or prints."""
        template = self.of.template if self.is_teachers else {}
        text = [prompt for prompt in prompts if not prompt.has_images]
        of_text, last = iter(self._of_text(text, template)), None
        found: list[list[int]] = []
        for prompt in prompts:
            if not prompt.has_images:
                found.append(next(of_text))
            elif are_same(last, prompt):  # once for the rows of a group
                found.append(found[-1])
            else:
                with prompt.named():
                    found.append(self.of.tokenize_with_images(prompt, **template, **prompt.template))
            last = prompt if prompt.has_images else None
        return found

    def _of_text(self, prompts: Sequence[Prompt], template: Mapping[str, Any]) -> list[list[int]]:
        try:
            found = self._tokenized(prompts, template)
        # A TypeError where content parts are joined as text, a ValueError without a template.
        except (TemplateError, TypeError, ValueError) as error:
            if len(prompts) > 1:  # one by one, to find the row
                return [ids for prompt in prompts for ids in self._of_text([prompt], template)]
            raise ValueError(f"{prompts[0].where}: the tokenizer's chat template rejects it: {error}.") from error
        for prompt, ids in zip(prompts, found, strict=True):
            self.check_start(ids, prompt.where, prompt.processor)
            if prompt.kind == "messages" and any(isinstance(one["content"], list) for one in prompt.value):
                check_parts(prompt.value, self.tokenizer_of(prompt).decode(ids), prompt.where)
        return found

    def _tokenized(self, prompts: Sequence[Prompt], template: Mapping[str, Any]) -> list[list[int]]:
        """Token ids by the tokenizer of each prompt."""
        found: list[list[int]] = [[]] * len(prompts)
        kinds = [(one.processor, one.environment, bool(one.template)) for one in prompts]
        for alike in dict.fromkeys(kinds):
            numbers = [number for number, kind in enumerate(kinds) if kind == alike]
            values = [prompts[number].value for number in numbers]
            arguments = {**template, **prompts[numbers[0]].template}
            name, environment, _ = alike
            if name in self.of.tokenizers:
                ids = read_alone(
                    self.of.tokenizers[name], values, prompts[0].kind, {**self.of.chat_template, **arguments}
                )
            else:
                named = {"environment": environment} if environment else {}
                ids = self.of.tokenize(values, **named, **arguments)
            for number, one in zip(numbers, ids, strict=True):
                found[number] = one
        return found

    def check_start(self, prompt_ids: list[int], where: str, processor: str = "") -> None:
        """Raises `ValueError` when a prompt has two start tokens, or one that stands for an image that is not there."""
        tokenizer, is_apart = self.of.tokenizers.get(processor, self.of.tokenizer), processor in self.of.tokenizers
        placeholders = frozenset[int]() if is_apart else self.of.placeholders
        if getattr(prompt_ids, "images", None) is None and (typed := set(prompt_ids) & placeholders):
            raise ValueError(
                f"{where} contains {tokenizer.decode([min(typed)])!r}, which stands for an image: give the image in a "
                "column 'images', or remove it from the text."
            )
        if tokenizer.bos_token_id is not None and prompt_ids[:2] == [tokenizer.bos_token_id] * 2:
            raise ValueError(
                f"{where} has two start tokens {tokenizer.bos_token!r}, one of its own and one that the tokenizer "
                "adds to text: remove the first from the text, or give messages, to which only the chat template adds."
            )


def are_same(last: Prompt | None, prompt: Prompt) -> bool:
    """Whether two prompts of different rows are known to be the same."""
    try:
        return last is not None and last == replace(prompt, where=last.where)
    except Exception:  # arrays have no truth, and comparing pictures decodes them
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The readers of student and teachers."""

    intake: Intake
    """Parses the rows."""
    tokenize: Callable[..., list[list[int]]]
    """Turns prompts of one kind into token ids; takes chat template arguments."""
    tokenize_with_images: Callable[..., list[int]]
    """Turns one prompt with images into token ids that know them; takes chat template arguments."""
    template: Mapping[str, Any]
    """Chat template arguments that differ for the teacher."""
    processors: Mapping[str, Any]
    """The processors inside `tokenize_with_images`, by [`~data.prompts.Prompt.processor`]."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer inside `tokenize`."""
    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    """Those of teachers that have their own, by the teacher's name."""
    largest_ids: Mapping[str, int]
    """The largest token id of each, and of `tokenizer` under an empty name: a large vocabulary takes long to search."""
    placeholders: frozenset[int]
    """Token ids that stand for an image or the like."""
    chat_template: Mapping[str, Any]
    """Chat template arguments of both, which `tokenize` adds by itself."""
    student_limits: PromptLimits
    """Limits of the student's prompts."""
    teacher_limits: Mapping[str, PromptLimits] = field(default_factory=dict)
    """Limits of each teacher's prompts, by its name."""

    @property
    def student(self) -> Reader:
        """The student's reader."""
        return Reader(of=self, is_teachers=False)

    @property
    def teacher(self) -> Reader:
        """The teachers' reader."""
        return Reader(of=self, is_teachers=True)

    @property
    def contrast(self) -> Reader | None:
        """The reader of the teachers' contrasts, if there are any."""
        return Reader(of=self, is_teachers=True, is_contrast=True) if self.intake.contrasts else None

    def with_teachers(
        self, vocabulary: int | None, contexts: Mapping[str, int | None], ids: Mapping[str, int]
    ) -> Readers:
        """A copy with the limits of the loaded teachers: their contexts, and the shared vocabulary or `None`.

        `ids` are the numbers of ids of teachers that have a tokenizer of their own.
        """
        # The student's prompts too may only have ids that all models know.
        limits = replace(self.student_limits, vocabulary=vocabulary or self.student_limits.vocabulary)
        theirs = {
            name: replace(
                limits,
                vocabulary=ids.get(name, limits.vocabulary),
                context=context,
                reader=f"the teacher {name!r}" if len(contexts) > 1 else "the teacher",
            )
            for name, context in contexts.items()
        }
        return replace(self, student_limits=limits, teacher_limits=theirs)

    def bounded_by_teacher(self, columns: Iterable[str]) -> Readers:
        """A copy whose student context is at most the teacher's, if one teacher scores the student's own prompts."""
        # With tools, a conversation grows until the context is full.
        if len(self.teacher_limits) > 1 or not self.are_alike(columns):
            return self
        (theirs,) = self.teacher_limits.values()
        return self.within(theirs)

    def within(self, limits: PromptLimits) -> Readers:
        """A copy whose student context is at most that of these limits, with its name."""
        mine = self.student_limits
        if limits.context is None or (mine.context is not None and mine.context <= limits.context):
            return self
        mine = replace(mine, context=limits.context, reader=limits.reader, remedy=limits.remedy)
        return replace(self, student_limits=mine)

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
        reads_apart = any(self.intake.processors) or self.tokenizers  # with a processor or tokenizer of its own
        reads_more = self.intake.rewrites or self.intake.is_told
        return not (self.template or reads_more or reads_apart or tells_more(columns))
