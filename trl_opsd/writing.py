"""The part of the trainer that knows the rollout: what generates completions, and whether these can be trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

from accelerate.logging import get_logger

from trl_opsd.config import OPSDConfig
from trl_opsd.data.readers import Readers, Request
from trl_opsd.loop.hooks import TrainerHooks
from trl_opsd.models.padding import PADDED, Reading
from trl_opsd.models.probes import prove_student
from trl_opsd.monitor.memory import explained
from trl_opsd.parallel.pulled import Endable
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.rollout import RolloutBackend
from trl_opsd.rollout.of_teacher import OfTeacher
from trl_opsd.rollout.pick import check_rollout, chosen_rollout
from trl_opsd.rollout.returned import begin_with_prompts, checked_completions, checked_stream

logger = get_logger(__name__)

_users: WeakValueDictionary[int, Writing] = WeakValueDictionary()
"""The trainer that each rollout was last bound to, by the id of the rollout, which that trainer keeps alive."""


class Writing(TrainerHooks):
    """A trainer whose student generates completions; a subclass teaches, and compares."""

    args: OPSDConfig
    readers: Readers
    reading: Reading = PADDED
    """Which rows the student can read in one batch."""
    _student_is_proved = False
    _has_completed = False
    _of_teacher: Mapping[str, OfTeacher] = MappingProxyType({})

    def prove_student(self) -> None:
        """Verifies the student by running it, once its weights are where they will be."""
        self.reading = prove_student(self.model, self.in_student, self.args, self.accelerator, self.args.padding_free)
        self._student_is_proved = True

    def bind(self, rollout: RolloutBackend) -> None:
        """Binds a rollout to this trainer; rejects one that cannot work with `overlap='ahead'`."""
        if self.writes_ahead:
            self._check_writes_apart(rollout)
        with explained("start", partial(self.footprint, "start")):
            rollout.bind(self)
        self._rollout = rollout
        _users[id(rollout)] = self

    def _check_writes_apart(self, rollout: RolloutBackend) -> None:
        if not rollout.writes_apart:
            why = f"{type(rollout).__name__} writes in the trainer's own process: set `vllm_mode='server'`"
        elif self.tools:
            why = "rows with `tools` are written in turns"
        elif type(self).complete is not Writing.complete:
            why = f"it would not call `{type(self).__name__}.complete`"
        else:
            return
        raise ValueError(f"`overlap='ahead'`: {why}; or leave `overlap` out.")

    @property
    def rollout(self) -> RolloutBackend:
        """The rollout that generates. Another can be assigned; the former is not closed."""
        return self._rollout

    @rollout.setter
    def rollout(self, rollout: RolloutBackend | None) -> None:
        self._launch.restore()
        with preserved_rng(self.accelerator.device):
            if rollout is None:
                rollout = chosen_rollout(None, self.args)
            check_rollout(rollout)
            self.bind(rollout)

    def session(self) -> AbstractContextManager[None]:
        return self.rollout.session()

    @property
    def streams(self) -> bool:
        return type(self).complete is Writing.complete and not self.tools

    @property
    def writes_apart(self) -> bool:
        return self.rollout.writes_apart

    def stream(self, prompt_ids: list[list[int]]) -> Endable[tuple[int, list[int]]]:
        self._be_ready_to_write()
        rows = self.rollout.stream([list(ids) for ids in prompt_ids], self.state.global_step)
        return checked_stream(rows, self, prompt_ids, type(self.rollout).__name__)

    def _be_ready_to_write(self) -> None:
        if not self._student_is_proved:
            self.prove_student()
        if _users.get(id(self.rollout)) is not self:  # another trainer has used it since
            self.bind(self.rollout)

    def let_teachers_write(self) -> None:
        """Prepares each teacher to generate for its rows with `seq_kd`; a `ValueError` if one cannot."""
        limits = self.readers.teacher_limits
        self._of_teacher = {name: OfTeacher(self, teacher, limits[name]) for name, teacher in self.teachers.items()}

    def of_teachers(self, rows: Sequence[Request]) -> list[list[int]]:
        reader = self.readers.teacher
        reader.check_kind([row.of_teacher for row in rows])
        prompts = reader.token_ids([row.of_teacher for row in rows])
        for row, ids in zip(rows, prompts, strict=True):
            reader.limits_of(row).check(len(ids), max(ids, default=0), row.of_teacher.where)
        found: dict[int, list[int]] = {}
        for name in dict.fromkeys(row.teacher for row in rows):
            theirs = [number for number, row in enumerate(rows) if row.teacher == name]
            written = self._of_teacher[name].complete([prompts[number] for number in theirs])
            found.update(zip(theirs, written, strict=True))
        return [found[number] for number in range(len(rows))]

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        self._be_ready_to_write()
        self.wait_for_rows()  # those generated ahead occupy the rollout
        # A copy, so that changing it does not change what is trained on.
        returned = self.rollout.complete([list(ids) for ids in prompt_ids], self.state.global_step)
        return checked_completions(returned, self, prompt_ids, type(self.rollout).__name__)

    def checked_completions(self, prompt_ids: list[list[int]], completions: Any) -> list[list[int]]:
        name = type(self.rollout).__name__
        if type(self).complete is not Writing.complete:
            name = f"{type(self).__name__}.complete"
            completions = checked_completions(completions, self, prompt_ids, name)
        padding = {self.processing_class.pad_token_id, *self.eos_token_ids}
        if not self._has_completed and begin_with_prompts(completions, prompt_ids, padding):
            logger.warning(
                f"Every completion that {name} returned begins with its whole prompt, which would be learned as part "
                "of it: return only what follows the prompt, `ids[len(prompt):]`. If the student itself repeats its "
                "prompts, see how they end in what is printed when a training begins."
            )
        self._has_completed = True
        return completions
