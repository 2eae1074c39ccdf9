"""Parses a dataset row once: the student's prompt, the name of its teacher, and that teacher's prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trl_opsd.data.prompts import Prompt, check_columns, check_no_images
from trl_opsd.data.teacher_prompts import Row, TeacherPrompts, teacher_of


class Request(dict[str, Any]):
    """A dataset row, parsed.

    Args:
        row (`Mapping[str, Any]`):
            The row; its columns are the keys.
        where (`str`):
            Its name in messages: `"row 3 of train_dataset"`.
        student ([`~data.prompts.Prompt`]):
            The student's prompt.
        teacher (`str`):
            The name of the teacher.
        of_teacher ([`~data.prompts.Prompt`]):
            The teacher's prompt from the columns; `teacher_prompt_fn` replaces it once there is a completion.

    Attributes:
        place (`int`, *optional*): place in the generation batch, over all processes, once it is in one.
        is_off_policy (`bool`, *optional*): whether its completion is the dataset's, once that is known.
        logprobs (`tuple[list[int], list[float]]`, *optional*): a completion, and those of its tokens.
        advantage (`float`): what its completion is worth beside the others of its prompt, once they have rewards.
    """

    __slots__ = ("advantage", "is_off_policy", "logprobs", "of_teacher", "place", "student", "teacher", "where")

    def __init__(self, row: Row, where: str, student: Prompt, teacher: str, of_teacher: Prompt) -> None:
        super().__init__(row)
        self.where, self.student, self.teacher, self.of_teacher = where, student, teacher, of_teacher
        self.place: int | None = None
        self.is_off_policy: bool | None = None
        self.logprobs: tuple[list[int], list[float]] | None = None
        self.advantage = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Parses rows, without a tokenizer."""

    teachers: tuple[str, ...]
    """Names of the teachers."""
    prompts: TeacherPrompts
    """Builds the teachers' prompts."""

    def read(self, row: Row, where: str) -> Request:
        """Parses one row; a row that is already parsed is returned unchanged.

        Args:
            row (`Mapping[str, Any]`):
                A dataset row.
            where (`str`):
                Its name in messages.

        Raises:
            ValueError: It lacks a column, has an image, names no known teacher, or has an invalid prompt.
            TypeError: A prompt is neither text nor messages.
        """
        if isinstance(row, Request):
            return row
        check_no_images(row, where)
        check_columns(row, where, self.teachers if len(self.teachers) > 1 else (), features=row)
        teacher = teacher_of(row, where, self.teachers)
        student = Prompt.of(row["prompt"], f"The prompt in {where}")
        in_row = self.prompts.prompt_fn is None and self.prompts.in_row(row)
        return Request(row, where, student, teacher, self.prompts.of(row, where) if in_row else student)

    def read_batch(self, rows: Iterable[Row], batch: str) -> list[Request]:
        """Parses the rows of a generation batch of this name; raises as [`read`]."""
        return [self.read(row, f"row {number} of {batch}") for number, row in enumerate(rows)]
