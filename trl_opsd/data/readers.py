"""Joins rows, templates and limits into two readers: the student, and its teacher, who may read something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trl_opsd.data.admission import Reader
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits, check_columns, check_no_images
from trl_opsd.data.teacher_prompts import Row, TeacherPrompts, teacher_of


def student_prompt(prompts: TeacherPrompts, teachers: tuple[str, ...], row: Row, name: str) -> Any:
    """What the student reads of a row.

    Args:
        prompts ([`~data.teacher_prompts.TeacherPrompts`]):
            Builds what a teacher reads, which is looked at too.
        teachers (`tuple[str, ...]`):
            Their names.
        row (`Mapping[str, Any]`):
            A dataset row.
        name (`str`):
            What to call it in a message.

    Raises:
        ValueError: It lacks a column, has an image, or what the teacher is to read cannot be read.
        TypeError: What the teacher is to read is neither text nor messages.
    """
    check_no_images({column: [row.get(column)] for column in IMAGE_COLUMNS}, name)
    check_columns(row, name, teachers if len(teachers) > 1 else ())
    teacher_of(row, name, teachers)
    if prompts.prompt_fn is None and prompts.in_row(row):
        prompts.of(row, name)
    return row["prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """What student and teachers make of dataset rows."""

    teachers: tuple[str, ...]
    """Names of the teachers."""
    prompts: TeacherPrompts
    """Builds what a teacher reads."""
    tokenize: Callable[..., list[list[int]]]
    """Turns prompts of one kind into token ids; takes arguments of the chat template."""
    template: Mapping[str, Any]
    """Arguments of the chat template that differ for the teacher."""
    has_template: bool
    """Whether the tokenizer has a chat template."""
    student_limits: PromptLimits
    """What a prompt of the student must keep to."""
    teacher_limits: Mapping[str, PromptLimits] = field(default_factory=dict)
    """The same of each teacher, by name."""

    @property
    def student(self) -> Reader:
        """Reads the prompt; looks at what the teacher will read as well, so that it is refused before one is loaded."""
        return Reader(
            prompt_of=partial(student_prompt, self.prompts, self.teachers),
            tokenize=self.tokenize,
            limits_of=lambda row: self.student_limits,
            has_template=self.has_template,
        )

    @property
    def teacher(self) -> Reader:
        """Reads what the columns say, since there is no completion yet."""
        return Reader(
            prompt_of=self.prompts.of,
            tokenize=self._tokenize_for_teacher,
            limits_of=lambda row: self.teacher_limits[teacher_of(row, "A row", self.teachers)],
            has_template=self.has_template,
        )

    def are_alike(self, columns: Iterable[str]) -> bool:
        """Whether the teacher reads what the student reads."""
        return not self.template and self.prompts.prompt_fn is None and not self.prompts.in_row(columns)

    def may_differ(self, columns: Iterable[str] | None) -> bool:
        """Whether the teacher may be unable to read rows the student can, as far as that is known before a completion.

        `None` stands for unknown columns.
        """
        if self.prompts.prompt_fn is not None:
            return False
        covered = all(limits.covers(self.student_limits) for limits in self.teacher_limits.values())
        return columns is None or not covered or not self.are_alike(columns)

    def retold(
        self,
        rows: Sequence[Row],
        prompts: list[list[int]],
        completions: list[list[int]],
        decode: Callable[..., list[str]],
    ) -> list[list[int]] | None:
        """What the teachers read before completions that are written by now; `None` where it is the student's prompt.

        Args:
            rows (`Sequence[Mapping[str, Any]]`):
                B dataset rows.
            prompts (`list[list[int]]`):
                B, what the student read.
            completions (`list[list[int]]`):
                B, what it wrote.
            decode (`Callable`):
                Turns completions into texts, if a function makes the teacher's prompts.

        Raises:
            ValueError: One cannot be read; the message names the row.
            TypeError: One is neither text nor messages.
        """
        alike = all(map(self.are_alike, rows))
        if not alike:
            made = self.prompts.prompt_fn is not None
            prompts = self.teacher_prompt_ids(rows, decode(completions, skip_special_tokens=True) if made else None)
        self.check_fits_teacher(rows, prompts, list(map(len, completions)))
        return None if alike else prompts

    def teacher_prompt_ids(self, rows: Sequence[Row], completions: Sequence[str] | None) -> list[list[int]]:
        """What the teachers read before completions that are written by now.

        Args:
            rows (`Sequence[Mapping[str, Any]]`):
                B dataset rows.
            completions (`Sequence[str]`, *optional*):
                B texts, what the student wrote; needed if a function makes the prompts.

        Returns:
            `list[list[int]]`: B prompts.

        Raises:
            ValueError: One cannot be read; the message names the row.
            TypeError: One is neither text nor messages.
        """
        names = [f"row {number} of this batch" for number in range(len(rows))]
        text_of = {} if completions is None else dict(zip(names, completions, strict=True))
        reader = replace(self.teacher, prompt_of=lambda row, name: self.prompts.of(row, name, text_of.get(name)))
        prompts, _ = reader.prompts(rows, names)
        return reader.tokenize(prompts)

    def check_fits_teacher(
        self, rows: Sequence[Row], prompt_ids: Sequence[list[int]], completion_lengths: Sequence[int]
    ) -> None:
        """Checks prompts with the completions that are written by now.

        Raises:
            ValueError: A teacher cannot look at so many tokens, or does not know one; the message names the row.
        """
        for number, (row, ids, length) in enumerate(zip(rows, prompt_ids, completion_lengths, strict=True)):
            where, limits = f"row {number} of this batch", self.teacher.limits_of(row)
            if limits.context is not None and len(ids) + length > limits.context:
                raise ValueError(
                    f"The teacher would have to read {len(ids)} tokens of its prompt and {length} of the completion in "
                    f"{where}, but can look at {limits.context}: shorten what it is shown, or what tools return."
                )
            replace(limits, completion=0).check(ids, f"What the teacher reads for {where}")

    def _tokenize_for_teacher(self, prompts: list[Any]) -> list[list[int]]:
        if self.template and isinstance(prompts[0], str):
            raise ValueError(
                f"`teacher_chat_template_kwargs={dict(self.template)!r}` has no effect: what the teacher reads "
                "is text: give messages, or remove the option."
            )
        return self.tokenize(prompts, **self.template)
