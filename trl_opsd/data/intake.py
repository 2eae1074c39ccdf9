"""Reads a dataset row once: what the student is asked, who teaches it, and what that teacher reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trl_opsd.data.prompts import IMAGE_COLUMNS, Prompt, check_columns, check_no_images
from trl_opsd.data.teacher_prompts import Row, TeacherPrompts, teacher_of


class Request(dict[str, Any]):
    """A dataset row, and what was read in it.

    Args:
        row (`Mapping[str, Any]`):
            The row; its columns are the keys.
        where (`str`):
            Its name, for messages: `"row 3 of train_dataset"`.
        student ([`~data.prompts.Prompt`]):
            What the student reads.
        teacher (`str`):
            The name of the teacher.
        of_teacher ([`~data.prompts.Prompt`]):
            What the teacher reads, as far as that is known before there is a completion.
    """

    __slots__ = ("of_teacher", "student", "teacher", "where")

    def __init__(self, row: Row, where: str, student: Prompt, teacher: str, of_teacher: Prompt) -> None:
        super().__init__(row)
        self.where, self.student, self.teacher, self.of_teacher = where, student, teacher, of_teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Reads rows, for which it needs no tokenizer."""

    teachers: tuple[str, ...]
    """Names of the teachers."""
    prompts: TeacherPrompts
    """Builds what a teacher reads."""

    def read(self, row: Row, where: str) -> Request:
        """One row; one that was read is returned as it is.

        Args:
            row (`Mapping[str, Any]`):
                A dataset row.
            where (`str`):
                What to call it in a message.

        Raises:
            ValueError: It lacks a column, has an image, names no teacher, or holds a prompt that cannot be read.
            TypeError: A prompt is neither text nor messages.
        """
        if isinstance(row, Request):
            return row
        check_no_images({column: [row.get(column)] for column in IMAGE_COLUMNS}, where)
        check_columns(row, where, self.teachers if len(self.teachers) > 1 else ())
        teacher = teacher_of(row, where, self.teachers)
        student = Prompt.of(row["prompt"], f"The prompt in {where}")
        in_row = self.prompts.prompt_fn is None and self.prompts.in_row(row)
        return Request(row, where, student, teacher, self.prompts.of(row, where) if in_row else student)

    def read_batch(self, rows: Iterable[Row]) -> list[Request]:
        """The rows of a generation batch; raises as [`read`]."""
        return [self.read(row, f"row {number} of this batch") for number, row in enumerate(rows)]
