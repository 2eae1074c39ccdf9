"""Parses a dataset row once: the student's prompt, the name of its teacher, and that teacher's prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trl_opsd.data.prompts import Prompt, check_columns, check_no_images
from trl_opsd.data.teacher_prompts import Row, TeacherPrompts, teacher_of


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
