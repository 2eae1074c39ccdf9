"""All teachers of a run by name, and what concerns all of them: heads, state, the routing of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from trl_opsd.models.head import gathered_head, shape_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.routing import targets_of
from trl_opsd.teacher.self_teacher import Average, Origin
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


@final
class Teachers(Mapping[str, Teacher]):
    """The teachers by name, with the average behind an `"ema"` teacher and the check of a `"base"` one."""

    def __init__(
        self, by_name: Mapping[str, Teacher], average: Average | None = None, origin: Origin | None = None
    ) -> None:
        self._by_name = dict(by_name)
        self.average = average
        self._origin = origin
        self._unproved = {name for name, one in by_name.items() if not _is_ours(one)}

    def __getitem__(self, name: str) -> Teacher:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def only(self) -> Teacher | None:
        """The teacher if there is exactly one, else `None`."""
        return next(iter(self.values())) if len(self) == 1 else None

    @property
    def models(self) -> dict[str, Any]:
        """The model of each, `None` for a teacher that is not a model."""
        return {name: getattr(teacher, "model", None) for name, teacher in self.items()}

    @property
    def heads(self) -> list[OutputHead]:
        """The output head of each, in order."""
        return [teacher.head for teacher in self.values()]

    @property
    def vocabularies(self) -> dict[str, int]:
        """The vocabulary size of each: the rows of its head."""
        return {name: shape_of(teacher.head)[0] for name, teacher in self.items()}

    @property
    def contexts(self) -> dict[str, int | None]:
        """The context length of each in tokens; `None` where there is no limit."""
        return {name: teacher.context for name, teacher in self.items()}

    def targets(self, rollout: Rollout, names: Sequence[str]) -> TeacherTargets:
        """[`~teacher.routing.targets_of`]; the first answer of a user's teacher is examined."""
        targets = targets_of(self, rollout, names, self._unproved)
        # The probe costs one more call, so it is made once per teacher.
        self._unproved.difference_update(names)
        return targets

    @property
    def begin_early(self) -> bool:
        """Whether any of them uses `expect`."""
        return any(type(teacher).expect is not Teacher.expect for teacher in self.values())

    def expect(self, rollout: Rollout, names: Sequence[str]) -> None:
        """Announces to each teacher its rows, by the teacher's name of each row."""
        for name in dict.fromkeys(names):
            self[name].expect(rollout.select([row for row, one in enumerate(names) if one == name]))

    def forget_expected(self) -> None:
        """Announces to each teacher that the rows it expects will not be needed."""
        for teacher in self.values():
            teacher.forget_expected()

    @contextmanager
    def whole_heads(self) -> Iterator[list[OutputHead]]:
        """The heads, gathered where ZeRO-3 has sharded one. Enter it after the student's, as both may share one."""
        heads = self.heads
        with gathered_head(*heads):
            yield heads

    def check(self) -> None:
        """Raises `ValueError` if a teacher has changed since the start. Collective."""
        if self._origin is not None:
            self._origin.check()

    def save(self, folder: str) -> None:
        """Writes the teachers' state to a checkpoint folder."""
        if self.average is not None:
            self.average.save(folder)

    def load(self, folder: str) -> None:
        """Loads the teachers' state from a checkpoint folder."""
        if self.average is not None:
            self.average.load(folder)


def _is_ours(teacher: Teacher) -> bool:
    """Whether a teacher scores with this package's code."""
    return str(type(teacher).targets.__module__).startswith(str(__package__))
