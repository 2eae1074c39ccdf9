"""All teachers of a run by name, and what belongs to them together: their heads, their state, whose a row is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from trl_opsd.models.head import gathered_head, shape_of
from trl_opsd.teacher.average import Average
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.origin import Origin
from trl_opsd.teacher.routed import targets_of
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


@final
class Teachers(Mapping[str, Teacher]):
    """The teachers by name.

    Args:
        by_name (`Mapping[str, Teacher]`):
            At least one.
        average ([`~teacher.average.Average`], *optional*):
            What the student's own follows, if it does.
        origin ([`~teacher.origin.Origin`], *optional*):
            What the student's own is without its adapter, if it is that.
    """

    def __init__(
        self, by_name: Mapping[str, Teacher], average: Average | None = None, origin: Origin | None = None
    ) -> None:
        self._by_name = dict(by_name)
        self.average = average
        self._origin = origin

    def __getitem__(self, name: str) -> Teacher:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def only(self) -> Teacher | None:
        """The teacher where there is one, `None` where there are several."""
        return next(iter(self.values())) if len(self) == 1 else None

    @property
    def models(self) -> dict[str, Any]:
        """The model behind each, `None` for one that is no model."""
        return {name: getattr(teacher, "model", None) for name, teacher in self.items()}

    @property
    def heads(self) -> list[OutputHead]:
        """Of each, in their order."""
        return [teacher.head for teacher in self.values()]

    @property
    def vocabularies(self) -> dict[str, int]:
        """Token ids that each has a logit for."""
        return {name: shape_of(teacher.head)[0] for name, teacher in self.items()}

    @property
    def contexts(self) -> dict[str, int | None]:
        """Tokens that each can look at; `None` where there is no limit."""
        return {name: teacher.context for name, teacher in self.items()}

    def targets(self, rollout: Rollout, names: Sequence[str]) -> TeacherTargets:
        """As [`~teacher.routed.targets_of`]: what each row's own teacher has to say about it."""
        return targets_of(self, rollout, names)

    @contextmanager
    def whole_heads(self) -> Iterator[list[OutputHead]]:
        """The heads, gathered where ZeRO-3 has split one. To be entered inside of the student's, which may be one."""
        heads = self.heads
        with gathered_head(*heads):
            yield heads

    def check(self) -> None:
        """Raises `ValueError` when a teacher is no longer what it was at the start. Collective."""
        if self._origin is not None:
            self._origin.check()

    def save(self, folder: str) -> None:
        """Writes what a resumed run needs into the folder of a checkpoint."""
        if self.average is not None:
            self.average.save(folder)

    def load(self, folder: str) -> None:
        """Reads it again."""
        if self.average is not None:
            self.average.load(folder)
