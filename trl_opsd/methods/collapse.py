"""Compares a training's last steps with its first ones, and warns of a collapse."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any, ClassVar, final

from accelerate.logging import get_logger
from numpy import ndarray
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.methods.base import Generated, Method
from trl_opsd.monitor.metrics import ALWAYS, STEPS, Logs, Metric

COMPARED_STEPS = 10
"""Optimizer steps at the start, and at the end, that are compared; both have to be complete."""

logger = get_logger(__name__)


@final
@dataclass
class CollapseGuard(Method, TrainerCallback):
    """Warns once of each sign of a collapse, when the last 10 optimizer steps leave the bounds in
    `docs/distributed.md`; a resumed training goes on with its course. A trainer has one unasked.

    Args:
        warns (`bool`, *optional*, defaults to `True`): Whether it warns, or only logs how lengths drift.
    """

    warns: bool = True

    whole_rows = whole_batch = resumed = False
    name = "course"
    metrics: ClassVar = {
        "completions/length_drift": Metric(
            "1",
            "Mean length of the student's completions, divided by that of the first 10 optimizer steps.",
            Logs(STEPS, f"{ALWAYS}, or no completion of the student", evaluated=False),
        ),
    }

    def begin(self) -> None:
        self.course = Course()
        self._sums: Mapping[str, float] = {}
        """Sums of the step, over all processes, by the names in [`LossParts.ROW_NAMES`]."""
        self._texts: tuple[float, float] | None = None
        """Mean length and share of repetitions of the step's completions."""
        self._warned: set[str] = set()

    # ---- A step -----------------------------------------------------------------------------------------------------

    def generated(self, batch: Generated) -> None:
        of = batch.counts
        if batch.is_training:
            count, tokens, repeated = (
                int((of[name] * of["by_student"]).sum()) for name in ("by_student", "ids", "repeats")
            )
            self._texts = (tokens / count, repeated / count) if count else None

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        self._sums = sums

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        signs = self._end_step()
        for name in (one for one in signs if one not in self._warned):
            logger.warning(f"Sign of a collapse at step {state.global_step}: {signs[name]}.")
            self._warned.add(name)

    def _end_step(self) -> dict[str, str]:
        """The signs of a collapse by name, after the step was added to the course."""
        sums, self._sums = self._sums, {}
        if not sums.get("weight") or self._texts is None:  # skipped, or no completion of the student's
            return {}
        length, repeated = self._texts
        means = {name: sums[name] / sums["weight"] for name in ("divergence", "student_entropy", "teacher_entropy")}
        self.course.add(Figures(**means, length=length, repeated=repeated))
        self.host.record("completions/length_drift", self.course.drift)
        return self.course.signs(clipped=self.host.args.kl_clip is not None) if self.warns else {}

    # ---- Checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        return self.course.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.course = Course.of(state)


# ---- The course of a run --------------------------------------------------------------------------------------------

GROWN = 4.0
"""Factor over the divergence of the first steps, or of the very first, before which nothing was changed."""
LARGE = 2.5
"""Nats per token above which it is compared with a single step, which may be low by chance."""
SMALL = 0.2
"""Nats per token: lower bound of the divergence that another is compared with."""
FALLEN = 0.1
"""Share of an entropy (the student's largest at the start, and the teacher's now) or of a length."""
EMPTY, SHORTER = 2.0, 0.5
"""Tokens of an empty answer; and the largest share of the initial length that it may be."""
STAYED = 0.5
"""Share of the initial divergence from which on the teacher still disagrees."""
REPEATED = 0.5
"""Share of completions that end in a repetition; a run that starts above half of it is not judged."""
BELOW = -0.05
"""Nats per token of a clipped divergence; 0 is where student and teacher agree."""
TAIL, GRAM = 32, 4
"""Tokens at the end of a completion, and tokens of an n-gram; in a repetition at most half of these are distinct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an optimizer step: means over its tokens (nats) or completions, of all processes."""

    divergence: float
    student_entropy: float
    teacher_entropy: float
    length: float
    """Tokens per completion."""
    repeated: float
    """Share of the completions that end in a repetition."""


class Course:
    """The first and the last steps of a run."""

    def __init__(self) -> None:
        self._first: list[Figures] = []
        self._last: deque[Figures] = deque(maxlen=COMPARED_STEPS)

    def add(self, step: Figures) -> None:
        """Adds the figures of the next step."""
        (self._first if len(self._first) < COMPARED_STEPS else self._last).append(step)

    @property
    def drift(self) -> float:
        """Length of the latest completions relative to the mean of the first steps; there has to be a step."""
        first = sum(one.length for one in self._first) / len(self._first)
        latest = self._last[-1] if self._last else self._first[-1]
        return latest.length / first if first else 1.0

    def signs(self, clipped: bool = False) -> dict[str, str]:
        """Signs of a collapse, by the name of the figure; empty for a healthy run, and in the first 20 steps."""
        if len(self._last) < COMPARED_STEPS:
            return {}
        first, last, very_first, found = _medians(self._first), _medians(self._last), self._first[0], {}
        # At a rate far too high the third step has collapsed: then not the first ten but the very first is a reference.
        now, before, at_once = (abs(one.divergence) for one in (last, first, very_first))
        if now > GROWN * max(before, SMALL) or (now >= LARGE and now > GROWN * at_once):
            found["divergence"] = (
                f"the divergence is {last.divergence:.3g} nats per token (first step: {very_first.divergence:.3g}, "
                f"first {COMPARED_STEPS}: {first.divergence:.3g}): the student moves away from its teacher. Lower the "
                "learning rate, use a longer warmup, or a bounded divergence"
            )
        # Clipped entries are bounded from above only, so the divergence may be below 0.
        if clipped and last.divergence < BELOW:
            found["clip"] = (
                f"the clipped divergence is {last.divergence:.3g} nats per token, but should be 0 at best: entries "
                "above `kl_clip` cost no more, while negative entries still lower the loss. Raise or remove `kl_clip`, "
                "or use `divergence='jsd'`, which has no negative entries"
            )
        # Not against its start alone: to become as certain as the teacher is the aim.
        begin = max(one.student_entropy for one in self._first)
        if last.student_entropy < FALLEN * min(begin, last.teacher_entropy):
            found["entropy"] = (
                f"the student's entropy is {last.student_entropy:.2g} nats, down from {begin:.2g}, while the teacher's "
                f"is {last.teacher_entropy:.2g}: the student is certain where its teacher is not. Lower the learning "
                "rate, or use `divergence='forward_kl'`, which is mode-covering"
            )
        shortest = min(max(1.0, min(EMPTY, FALLEN * first.length)), SHORTER * first.length)
        if last.length <= shortest and now >= STAYED * before:
            found["length"] = (
                f"completions have {last.length:.3g} tokens, down from {first.length:.3g}, but the divergence has "
                "hardly fallen: the student stops at once. Check the end tokens and the teacher's prompts, or lower "
                "the learning rate"
            )
        if last.repeated >= REPEATED and first.repeated <= REPEATED / 2:
            found["repetition"] = (
                f"{last.repeated:.0%} of the completions end in a repetition, up from {first.repeated:.0%}: the "
                "teacher only continues repetitive text. Lower the learning rate, `max_completion_length` or `top_p`"
            )
        return found

    def state(self) -> dict[str, Any]:
        """The whole state, in numbers that JSON stores exactly."""
        return {"first": [asdict(one) for one in self._first], "last": [asdict(one) for one in self._last]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Course:
        """The inverse of [`state`]."""
        self = cls()
        self._first = [Figures(**one) for one in state["first"]]
        self._last.extend(Figures(**one) for one in state["last"])
        return self


def _medians(steps: Iterable[Figures]) -> Figures:
    # Medians: one odd step is no collapse.
    columns = zip(*map(astuple, steps), strict=True)
    return Figures(**dict(zip(Figures.__dataclass_fields__, map(median, columns), strict=True)))


def is_repetition(ids: Sequence[int]) -> bool:
    """Whether at most half of the 4-grams of the last 32 tokens of a completion differ; not of a shorter one."""
    tail = ids[-TAIL:]
    grams = [tuple(tail[place : place + GRAM]) for place in range(len(tail) - GRAM + 1)]
    return len(tail) == TAIL and 2 * len(set(grams)) <= len(grams)
