"""Compares a training's last steps with its first ones, and warns of a collapse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from statistics import median
from typing import Any, final

from accelerate.logging import get_logger
from numpy import ndarray

from trl_opsd.methods.base import Generated, Method

COMPARED_STEPS = 10
"""Optimizer steps at the start, and at the end, that are compared; both have to be complete."""
SMALL = 0.2
"""Nats per token: lower bound of the divergence that another is compared with."""
TAIL, GRAM = 32, 4
"""Tokens at the end of a completion, and tokens of an n-gram; in a repetition at most half of these are distinct."""

logger = get_logger(__name__)


@final
@dataclass
class CollapseGuard(Method):
    """Warns once of each sign of a collapse, when the last 10 optimizer steps leave the bounds in
    `docs/distributed.md`; resuming restores its statistics. Each trainer has one by default.

    Args:
        warns (`bool`, *optional*, defaults to `True`): Whether it warns.
    """

    warns: bool = True

    whole_rows = whole_batch = resumed = False
    name = "course"

    def begin(self) -> None:
        self.course = Course()
        self._texts: tuple[float, float] | None = None
        """Mean length and share of repetitions of the step's completions."""
        self._warned: set[str] = set()

    def generated(self, batch: Generated) -> None:
        of = batch.counts
        if batch.is_training:
            count, tokens, repeated = (
                int((of[name] * of["by_student"]).sum()) for name in ("by_student", "ids", "repeats")
            )
            self._texts = (tokens / count, repeated / count) if count else None

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        if not sums["weight"] or self._texts is None:  # no completion of the student's
            return
        means = {name: sums[name] / sums["weight"] for name in ("divergence", "student_entropy", "teacher_entropy")}
        length, repeated = self._texts
        self.course.add(Figures(**means, length=length, repeated=repeated))
        for name in self.course.signs() if self.warns else ():
            if name not in self._warned:
                self._warned.add(name)
                step = self.host.state.global_step + 1
                logger.warning(f"The student may be collapsing, by its {name}, at step {step} (docs/distributed.md).")

    def state(self) -> Mapping[str, Any]:
        return asdict(self.course)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.course = Course(*([Figures(**one) for one in state[name]] for name in ("first", "last")))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of an optimizer step: means over its tokens (nats) or completions, of all processes."""

    divergence: float
    student_entropy: float
    teacher_entropy: float
    length: float
    """Tokens per completion."""
    repeated: float
    """Share of the completions that end in a repetition."""


@dataclass
class Course:
    """The first and the last steps of a run."""

    first: list[Figures] = field(default_factory=list)
    last: list[Figures] = field(default_factory=list)

    def add(self, step: Figures) -> None:
        (self.first if len(self.first) < COMPARED_STEPS else self.last).append(step)
        del self.last[:-COMPARED_STEPS]

    def signs(self) -> list[str]:
        """The figures that are signs of a collapse; none of a healthy run, or in the first 20 steps."""
        if len(self.last) < COMPARED_STEPS:
            return []
        first, last = _medians(self.first), _medians(self.last)
        now, before, at_once = (abs(one.divergence) for one in (last, first, self.first[0]))
        certain = max(one.student_entropy for one in self.first)
        short = min(max(1.0, min(2.0, 0.1 * first.length)), 0.5 * first.length)
        found = {
            # At a rate far too high the third step has collapsed.
            "divergence": now > 4 * max(before, SMALL) or (now >= 2.5 and now > 4 * at_once),
            # Not against its start alone: to become as certain as the teacher is the aim.
            "entropy": last.student_entropy < 0.1 * min(certain, last.teacher_entropy),
            # Shorter completions are no collapse where the student has learned them from its teacher.
            "length": last.length <= short and now >= 0.5 * before,
            # A run that starts with many is not judged.
            "repetition": last.repeated >= 0.5 and first.repeated <= 0.25,
        }
        return [name for name, is_sign in found.items() if is_sign]


def _medians(steps: Iterable[Figures]) -> Figures:
    # Medians: one odd step is no collapse.
    return Figures(*map(median, zip(*map(astuple, steps), strict=True)))


def is_repetition(ids: Sequence[int]) -> bool:
    """Whether at most half of the 4-grams of the last 32 tokens of a completion differ; not of a shorter one."""
    tail = ids[-TAIL:]
    grams = [tuple(tail[place : place + GRAM]) for place in range(len(tail) - GRAM + 1)]
    return len(tail) == TAIL and 2 * len(set(grams)) <= len(grams)
