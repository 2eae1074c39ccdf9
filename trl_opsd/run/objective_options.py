"""Checks the options that say what is learned: the settings of divergences, and what shapes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import Divergence
from trl_opsd.losses.clipping import check_clip
from trl_opsd.losses.registry import READ
from trl_opsd.run.ranges import above, between, in_range

__all__ = ["check_objective", "temperatures_in_words", "unread_objective"]


def check_objective(args: DistillationConfig) -> None:
    """Refuses settings that are out of range, and shapes that a divergence cannot have.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options, whose `divergence` was checked.

    Raises:
        ValueError: An option is out of range, or contradicts another.
    """
    for name in READ:
        between(name, getattr(args, name), 0.0, 1.0)
    in_range("position_discount", args.position_discount, 0.0, 1.0, open_below=True)
    for name in ("kl_clip", "student_temperature", "teacher_temperature"):
        if getattr(args, name) is not None:
            above(name, getattr(args, name), 0.0)
    check_clip(args.kl_clip, args.build_divergence())


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss, for a reader."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def unread_objective(args: DistillationConfig, divergence: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that the objective does not read, and why; `divergence` overrides that of the options."""
    chosen = args.divergence if divergence is None else divergence
    for name, readers in READ.items():
        if chosen not in readers:
            why = "is an object" if isinstance(chosen, Divergence) else f"is {chosen!r}"
            yield (name,), f"`divergence` {why}"
