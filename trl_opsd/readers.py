"""Joins rows, templates and limits into two readers: the student, and its teacher, who may read something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from trl_opsd.admission import Reader
from trl_opsd.prompts import PromptLimits, check_columns
from trl_opsd.teacher_prompts import Row, TeacherPrompts, teacher_of


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
            prompt_of=self._prompt_of_student,
            tokenize=self.tokenize,
            limits_of=lambda row: self.student_limits,
            has_template=self.has_template,
        )

    @property
    def teacher(self) -> Reader:
        """Reads what the columns say, since there is no completion yet."""
        return Reader(
            prompt_of=self.prompts.of,
            tokenize=partial(self.tokenize, **self.template),
            limits_of=lambda row: self.teacher_limits[teacher_of(row, "A row", self.teachers)],
            has_template=self.has_template,
        )

    def are_alike(self, columns: Iterable[str]) -> bool:
        """Whether the teacher reads what the student reads."""
        return not self.template and self.prompts.prompt_fn is None and not self.prompts.in_row(columns)

    def may_differ(self, columns: Iterable[str] | None) -> bool:
        """Whether the teacher may be unable to read rows the student can; `None` stands for unknown columns."""
        covered = all(limits.covers(self.student_limits) for limits in self.teacher_limits.values())
        return columns is None or not covered or not self.are_alike(columns)

    def teacher_prompt_ids(
        self, rows: Sequence[Row], completions: Sequence[str], lengths: Sequence[int]
    ) -> list[list[int]]:
        """What the teachers read before completions that are written by now.

        Args:
            rows (`Sequence[Mapping[str, Any]]`):
                B dataset rows.
            completions (`Sequence[str]`):
                B texts, what the student wrote.
            lengths (`Sequence[int]`):
                B tokens in each of them.

        Returns:
            `list[list[int]]`: B prompts.

        Raises:
            ValueError: One cannot be read, or does not fit; the message names the row.
            TypeError: One is neither text nor messages.
        """
        names = [f"row {number} of this batch" for number in range(len(rows))]
        text_of = dict(zip(names, completions, strict=True))
        reader = replace(self.teacher, prompt_of=lambda row, name: self.prompts.of(row, name, text_of[name]))
        prompts, _ = reader.prompts(rows, names)
        prompt_ids = reader.tokenize(prompts)
        for row, name, ids, length in zip(rows, names, prompt_ids, lengths, strict=True):
            replace(reader.limits_of(row), completion=length).check(ids, f"What the teacher reads for {name}")
        return prompt_ids

    def _prompt_of_student(self, row: Row, name: str) -> Any:
        check_columns(row, name, self.teachers if len(self.teachers) > 1 else ())
        teacher_of(row, name, self.teachers)
        if self.prompts.in_row(row):
            self.prompts.of(row, name)
        return row["prompt"]
