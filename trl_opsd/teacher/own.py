"""A teacher that is the student itself, in one of its other states: without its adapter, averaged, or as it is now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, context_of
from trl_opsd.models.padding import Reading
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.forward import most_of_all, passes_needed, read
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


@final
class OwnTeacher(Teacher):
    """Reads with the student's own parameters, so no second copy of the model exists.

    What it knows more than the student has to stand in its prompt.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student without a distributed wrapper. Its mode is restored after each reading.
        run (`Callable`):
            `run(function, *args)` equals `function(student, *args)`, also when the student is split.
        as_teacher (`Callable`):
            Makes a context in which the student's parameters are the teacher's: `student.disable_adapter` for the
            model the adapter was put on, `contextlib.nullcontext` for the student as it is now.
        reading (`Callable`):
            Says which rows the student reads in one batch, which for a student that is split is found out late.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used up: see `OPSDConfig.teacher_cache_device`.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.

    Attributes:
        reading ([`~models.padding.Reading`]): which rows are read in one batch: those that the student reads so.
    """

    def __init__(
        self,
        student: CausalLM,
        run: Run,
        as_teacher: Callable[[], AbstractContextManager[Any]],
        reading: Callable[[], Reading],
        cache_device: str = "auto",
        progress: bool = False,
    ) -> None:
        self.model = student
        with as_teacher():
            self._head = OutputHead.of(student)
        # The module and not its tensors: FSDP2 has others when training has begun. The last one, as a head may be tied.
        *_, self._layer = (one for one in student.modules() if getattr(one, "weight", None) is self._head.weight)
        self._run = run
        self._as_teacher = as_teacher
        self._cache_device = cache_device
        self._progress = progress
        self._reading = reading

    @property
    def head(self) -> OutputHead:
        return replace(self._head, weight=self._layer.weight, bias=getattr(self._layer, "bias", None))

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    @property
    def reading(self) -> Reading:
        return self._reading()

    def targets(self, rollout: Rollout) -> TeacherTargets:
        was_training = self.model.training
        self.model.eval()
        try:
            device = rollout.completion_ids.device
            # A student that is split over processes reads with all of them, so all have to read equally often.
            passes = most_of_all(passes_needed(self.model, rollout), device)
            with self._as_teacher():
                hidden_BCH = read(self._run, rollout, passes, device, self._cache_device, self._progress, self.reading)
                return TeacherTargets(hidden=hidden_BCH)
        finally:
            self.model.train(was_training)
