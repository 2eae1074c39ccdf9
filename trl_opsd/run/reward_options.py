"""Checks the options of rewards, and of what pulls at single completions besides the divergence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import at_least, one_of

__all__ = ["AGGREGATIONS", "SCALES", "check_reward_args", "check_rewards", "unread_rewards"]

SCALES = ("group", "batch", "none")
"""What the differences between rewards are divided by, as in TRL's GRPO."""
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
"""How several rewards become one, as there."""


def check_rewards(args: DistillationConfig) -> None:
    """Refuses rewards that no option can be right for, and gives `scale_rewards` its name.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: An option is out of range, or contradicts another.
    """
    args.scale_rewards = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    one_of("scale_rewards", args.scale_rewards, SCALES)
    one_of("multi_objective_aggregation", args.multi_objective_aggregation, AGGREGATIONS)
    at_least("reward_weight", args.reward_weight, 0)
    at_least("sft_weight", args.sft_weight, 0)
    _check_weights(args)
    if args.reward_weight:
        _check_groups(args)


def _check_weights(args: Any) -> None:
    if args.reward_weights is None:
        return
    weights = args.reward_weights if isinstance(args.reward_weights, list | tuple) else [None]
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in weights):
        raise ValueError(
            f"`reward_weights={args.reward_weights!r}`: expected a list of finite numbers, one for each function."
        )


def _check_groups(args: Any) -> None:
    """Refuses a weight of rewards without other completions of a prompt, or of the student, to hold them against."""
    asked = f"`reward_weight={args.reward_weight}`"
    if args.num_generations < 2:
        raise ValueError(
            f"{asked} with `num_generations={args.num_generations}`: a reward counts relative to those of the other "
            "completions of its prompt, and there are none: set `num_generations` to 2 or more (TRL's GRPO has 8)."
        )
    if args.lmbda == 0:
        raise ValueError(
            f"{asked} with `lmbda=0`: rewards are for what the student writes, which is nothing: set a higher `lmbda`, "
            "or leave `reward_weight` out."
        )
    if args.overlap == "step":
        raise ValueError(
            f"{asked} with `overlap='step'`: a row is learned before the other completions of its prompt have ended, "
            "whose rewards it is held against: leave `overlap` out, or set `overlap='ahead'`."
        )


def check_reward_args(args: Any, functions: int, is_trained: bool) -> None:
    """Holds the options against the reward functions that were passed.

    Args:
        args ([`OPSDConfig`]):
            The options.
        functions (`int`):
            Their number.
        is_trained (`bool`):
            Whether there are rows to train on.

    Raises:
        ValueError: There are none, or not as many as `reward_weights`.
    """
    if args.reward_weight and not functions and is_trained:
        raise ValueError(
            f"`reward_weight={args.reward_weight}` without rewards: pass `reward_funcs` to `OPSDTrainer`, or leave it "
            "out."
        )
    if functions and args.reward_weights is not None and len(args.reward_weights) != functions:
        raise ValueError(
            f"`reward_weights` has {len(args.reward_weights)} numbers, and `reward_funcs` {functions}: expected one "
            "for each."
        )


def unread_rewards(args: Any, functions: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that are not read, and why.

    Args:
        args ([`OPSDConfig`]):
            The options.
        functions (`int`):
            Number of reward functions.
    """
    if not functions:
        yield ("reward_weights",), "there are no `reward_funcs`"
    if not args.reward_weight:
        yield ("scale_rewards", "multi_objective_aggregation"), "`reward_weight` is 0"
    if args.lmbda == 1:
        yield ("sft_weight",), "`lmbda` is 1, so that the student writes all completions"
