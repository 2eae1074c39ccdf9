"""A teacher that is the student itself in another state: without its adapter, averaged, or as it is now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import is_split_model
from trl_opsd.models.backbone import Run, context_of
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.padding import Reading
from trl_opsd.models.size import sizes
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.forward import max_over_processes, pass_groups, read
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


@final
class OwnTeacher(Teacher):
    """Scores with the student's own parameters, so that no second copy of the model exists.

    Anything it knows beyond the student has to be in its prompt.
    """

    def __init__(
        self,
        student: CausalLM,
        run: Run,
        as_teacher: Callable[[], AbstractContextManager[Any]],
        reading: Callable[[], Reading],
        cache_device: str = "auto",
        progress: bool = False,
        kept: Collection[Tensor] = (),
    ) -> None:
        self.model = student
        # `as_teacher` makes the student's parameters the teacher's: `disable_adapter`, or nothing for the live student.
        with as_teacher():
            self._head = OutputHead.of(student)
        # The module, not its tensors, which FSDP2 replaces when training begins. The last match, as a head may be tied.
        *_, self._layer = (one for one in student.modules() if getattr(one, "weight", None) is self._head.weight)
        self._run = run
        self._as_teacher = as_teacher
        self._cache_device = cache_device
        self._progress = progress
        self._reading = reading  # a callable: for a sharded student it is known only later
        self._kept = kept  # weights that `as_teacher` swaps in, to describe their size

    def __str__(self) -> str:
        return f"{sizes(self._kept)} in place of the student's" if self._kept else "no weights of its own"

    @property
    def head(self) -> OutputHead:
        return replace(self._head, weight=self._layer.weight, bias=getattr(self._layer, "bias", None))

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    @property
    def reading(self) -> Reading:
        return self._reading()

    @contextmanager
    def lent(self) -> Iterator[CausalLM]:
        """The student, as the teacher it is."""
        with self._as_teacher():
            yield self.model

    def targets(self, rollout: Rollout) -> TeacherTargets:
        device = rollout.completion_ids.device
        with preserved_mode(self.model):
            self.model.eval()
            # A sharded student's forward is collective, so all processes run the same number of passes.
            groups = pass_groups(self.model, rollout, self.reading, few=is_split_model(self.model))
            passes = max_over_processes(len(groups), device)
            with self._as_teacher():
                return read(
                    self._run, rollout, groups, passes, device, self._cache_device, self._progress, self.reading
                )
