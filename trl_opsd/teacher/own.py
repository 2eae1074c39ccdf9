"""A teacher that is the student itself, in one of its other states: without its adapter, averaged, or as it is now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from trl_opsd.backbone import context_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.forward import read
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


@final
class OwnTeacher(Teacher):
    """Reads with the student's own parameters, so no second copy of the model exists.

    What it knows more than the student has to stand in its prompt.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, whole, without a distributed wrapper. Its mode is restored after each reading.
        as_teacher (`Callable`):
            Makes a context in which the student's parameters are the teacher's: `student.disable_adapter` for the
            model the adapter was put on, `contextlib.nullcontext` for the student as it is now.
        rows_per_pass (`int`):
            Rows of a generation batch read in one forward pass.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.
    """

    def __init__(
        self,
        student: Any,
        as_teacher: Callable[[], AbstractContextManager[Any]],
        rows_per_pass: int,
        progress: bool = False,
    ) -> None:
        self.model = student
        self._as_teacher = as_teacher
        self._rows_per_pass = rows_per_pass
        self._progress = progress

    @property
    def head(self) -> OutputHead:
        with self._as_teacher():
            return OutputHead.of(self.model)

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    def targets(self, rollout: Rollout) -> TeacherTargets:
        was_training = self.model.training
        self.model.eval()
        try:
            with self._as_teacher():
                device = rollout.completion_ids.device
                return TeacherTargets(hidden=read(self.model, rollout, self._rows_per_pass, device, self._progress))
        finally:
            self.model.train(was_training)
