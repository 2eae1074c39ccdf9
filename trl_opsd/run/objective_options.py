"""Checks the options that say what is learned: the settings of divergences, and what shapes them."""

from __future__ import annotations

from collections.abc import Iterator

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import Divergence
from trl_opsd.losses.clipping import check_clip
from trl_opsd.losses.registry import READ
from trl_opsd.run.ranges import above, between

__all__ = ["check_objective", "unread_objective"]


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
    if args.kl_clip is not None:
        above("kl_clip", args.kl_clip, 0.0)
    check_clip(args.kl_clip, args.build_divergence())


def unread_objective(args: DistillationConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that the objective does not read, and why."""
    for name, readers in READ.items():
        if args.divergence not in readers:
            why = "is an object" if isinstance(args.divergence, Divergence) else f"is {args.divergence!r}"
            yield (name,), f"`divergence` {why}"
