"""The objective in words, for the banner and the model card."""

from __future__ import annotations

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.options.table import OURS, Situation, is_set


def temperatures_in_words(student: float, teacher: float) -> str:
    """The temperatures of the loss."""
    if student == teacher:
        return f"temperature {student:g}"
    return f"temperature {student:g} (student) and {teacher:g} (teacher)"


def shape_in_words(args: DistillationConfig) -> str:
    """What is done to the divergence of tokens, and what is added to it, with a comma before each."""
    now = Situation(args=args)
    told = {name: one for name, one in OURS.items() if one.words and is_set(args, name)}
    parts = [one.words.format(getattr(args, name)) for name, one in told.items() if one.lacks(now) is None]
    selection = args.build_selection()
    return "".join(f", {part}" for part in (*parts, selection) if part is not None)
