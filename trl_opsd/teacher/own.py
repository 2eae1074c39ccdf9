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
    """Reads with the student's own parameters, so no second copy of the model exists.

    Anything it knows beyond the student has to be in its prompt.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student without a distributed wrapper. Its mode is restored after each reading.
        run (`Callable`):
            `run(function, *args)` equals `function(student, *args)`, also when the student is split.
        as_teacher (`Callable`):
            Makes a context in which the student's parameters are the teacher's: `student.disable_adapter` for the
            model under the adapter, `contextlib.nullcontext` for the student as it is now.
        reading (`Callable`):
            Returns which rows the student reads in one batch; for a split student this is known only later.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used: see `OPSDConfig.teacher_cache_device`.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.
        kept (`Collection[torch.Tensor]`, *optional*):
            Weights that `as_teacher` puts in place of the student's.

    Attributes:
        reading ([`~models.padding.Reading`]): which rows are read in one batch; the same as for the student.
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
        with as_teacher():
            self._head = OutputHead.of(student)
        # The module, not its tensors: FSDP2 replaces them when training begins. The last match, as a head may be tied.
        *_, self._layer = (one for one in student.modules() if getattr(one, "weight", None) is self._head.weight)
        self._run = run
        self._as_teacher = as_teacher
        self._cache_device = cache_device
        self._progress = progress
        self._reading = reading
        self._kept = kept

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
            # The forward of a split student is collective, so all processes run the same number of passes.
            groups = pass_groups(self.model, rollout, self.reading, few=is_split_model(self.model))
            passes = max_over_processes(len(groups), device)
            with self._as_teacher():
                return read(
                    self._run, rollout, groups, passes, device, self._cache_device, self._progress, self.reading
                )
