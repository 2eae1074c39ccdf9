"""Detects a collapse from the figures of a run's first and last steps, and describes it; knows numbers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median
from typing import Any

STEPS = 10
"""Optimizer steps at the start, and at the end, whose medians are compared; both have to be complete."""
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
    """Figures of an optimizer step: means over its tokens or completions, of all processes."""

    divergence: float
    """Nats per token."""
    student_entropy: float
    """Nats."""
    teacher_entropy: float
    """Nats."""
    length: float
    """Tokens per completion."""
    repeated: float
    """Share of the completions that end in a repetition."""


class Course:
    """The first and the last steps of a run."""

    def __init__(self) -> None:
        self._first: list[Figures] = []
        self._last: deque[Figures] = deque(maxlen=STEPS)

    def add(self, step: Figures) -> None:
        """Adds the figures of the next step."""
        if len(self._first) < STEPS:
            self._first.append(step)
        else:
            self._last.append(step)

    @property
    def drift(self) -> float:
        """Length of the latest completions relative to the mean of the first steps; there has to be a step."""
        first = sum(one.length for one in self._first) / len(self._first)
        latest = self._last[-1] if self._last else self._first[-1]
        return latest.length / first if first else 1.0

    def signs(self, clipped: bool = False) -> dict[str, str]:
        """Signs of a collapse, by the name of the figure; empty for a healthy run, and in the first 20 steps."""
        if len(self._last) < STEPS:
            return {}
        first, last = _medians(self._first), _medians(self._last)
        # Clipped entries are bounded from above only, so the divergence may be below 0.
        found = {
            "divergence": self._divergence(first, last),
            "clip": _clip(last) if clipped else None,
            "entropy": self._entropy(last),
            "length": _length(first, last),
            "repetition": _repetition(first, last),
        }
        return {name: sign for name, sign in found.items() if sign is not None}

    def _divergence(self, first: Figures, last: Figures) -> str | None:
        # At a rate far too high the third step has collapsed: then not the first ten but the very first is a reference.
        now, before, at_once = (abs(one.divergence) for one in (last, first, self._first[0]))
        if now <= GROWN * max(before, SMALL) and (now < LARGE or now <= GROWN * at_once):
            return None
        return (
            f"the divergence is {last.divergence:.3g} nats per token, and was {self._first[0].divergence:.3g} in the "
            f"first step, {first.divergence:.3g} in the first {STEPS}: the student moves away from its teacher. Lower "
            "the learning rate, warm it up for longer, or use a bounded divergence"
        )

    def _entropy(self, last: Figures) -> str | None:
        begin = max(one.student_entropy for one in self._first)
        # Not against its start alone: to become as certain as the teacher is the aim.
        if last.student_entropy >= FALLEN * min(begin, last.teacher_entropy):
            return None
        return (
            f"the student's entropy is {last.student_entropy:.2g} nats, and was {begin:.2g}; the teacher's is "
            f"{last.teacher_entropy:.2g} there: the student is certain where its teacher is not. Lower the learning "
            "rate, or use `divergence='forward_kl'`, which leaves nothing out that the teacher finds likely"
        )

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


def _medians(steps: Sequence[Figures] | deque[Figures]) -> Figures:
    names = Figures.__dataclass_fields__
    # Medians: one odd step is no collapse.
    return Figures(**dict(zip(names, map(median, zip(*map(astuple, steps), strict=True)), strict=True)))


def _clip(last: Figures) -> str | None:
    if last.divergence >= BELOW:
        return None
    return (
        f"the clipped divergence is {last.divergence:.3g} nats per token, and 0 is where the models agree: beyond "
        "`kl_clip` an error costs nothing more, and the student gains by it in the entries below 0. Raise `kl_clip` or "
        "leave it out, or use `divergence='jsd'`, none of whose entries is below 0"
    )


def _length(first: Figures, last: Figures) -> str | None:
    disagrees = abs(last.divergence) >= STAYED * abs(first.divergence)
    shortest = min(max(1.0, min(EMPTY, FALLEN * first.length)), SHORTER * first.length)
    if last.length > shortest or not disagrees:
        return None
    return (
        f"completions have {last.length:.3g} tokens, and had {first.length:.3g}, and the divergence has hardly fallen: "
        "the student ends at once. Look at the end tokens and at what the teacher reads, or lower the learning rate"
    )


def _repetition(first: Figures, last: Figures) -> str | None:
    if last.repeated < REPEATED or first.repeated > REPEATED / 2:
        return None
    return (
        f"{last.repeated:.0%} of the completions end in a repetition, and {first.repeated:.0%} did: where a text "
        "repeats itself, the teacher only goes on with it. Lower the learning rate, `max_completion_length` or `top_p`"
    )


def is_repetition(ids: Sequence[int]) -> bool:
    """Whether at most half of the 4-grams of the last 32 tokens of a completion differ; not of a shorter one."""
    tail = ids[-TAIL:]
    grams = [tuple(tail[place : place + GRAM]) for place in range(len(tail) - GRAM + 1)]
    return len(tail) == TAIL and 2 * len(set(grams)) <= len(grams)
