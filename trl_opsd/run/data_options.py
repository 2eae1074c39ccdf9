"""Checks the options of who completes a prompt, and how often, and says how many prompts a step has."""

from __future__ import annotations

import warnings
from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import at_least_one, in_range

__all__ = ["batch_in_words", "check_data", "prompts_of_step"]


def check_data(args: DistillationConfig) -> None:
    """Refuses numbers of completions that do not fill a step, or that would all be the same.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: `num_generations` does not divide the rows of a step, or completions are not sampled.
    """
    at_least_one("num_generations", args.num_generations)
    if args.num_generations_eval is not None:
        at_least_one("num_generations_eval", args.num_generations_eval)
    _check_sources(args)
    rows = _rows_of_step(args)
    if rows % args.num_generations:
        raise ValueError(
            f"`num_generations={args.num_generations}`: a generation batch has {rows} = {_factors(args)} rows, which "
            "have to be whole groups of completions of one prompt: set a divisor of that number, or other numbers."
        )
    for option in ("num_generations", "num_generations_eval"):
        if (getattr(args, option) or 1) > 1 and (why := _all_alike(args)):
            raise ValueError(
                f"`{option}={getattr(args, option)}` with `generation_kwargs={args.generation_kwargs}`: {why}, so that "
                "all completions of a prompt are the same: remove one of them."
            )


def _check_sources(args: Any) -> None:
    in_range("lmbda", args.lmbda, 0.0, 1.0)
    if args.seq_kd and args.lmbda == 1:
        raise ValueError(
            "`seq_kd=True` with `lmbda=1`, the default: the teacher would write for no row. Set `lmbda=0.5`, for half "
            "of them, as in TRL's GKD trainer, or 0, for all."
        )
    if args.lmbda == 1:
        return
    if args.seq_kd and (args.teacher_server_url is not None or args.teacher_offload in ("stream", "zero3")):
        raise ValueError(
            f"`seq_kd=True` with {_whereabouts(args)}: completions are written by a whole teacher in each process. Set "
            "`teacher_offload='none'` or 'cpu', or write them before, into a column 'completion'."
        )
    if args.overlap is not None:
        raise ValueError(
            f"`lmbda={args.lmbda}` with `overlap={args.overlap!r}` is not supported: set `lmbda=1`, or leave `overlap` "
            "out."
        )
    if args.num_generations > 1 and not args.seq_kd:
        warnings.warn(
            f"`lmbda={args.lmbda}` with `num_generations={args.num_generations}`: the completion of the dataset may be "
            "learned several times in a step. Set one of them to 1.",
            stacklevel=5,
        )


def _whereabouts(args: Any) -> str:
    if args.teacher_server_url is not None:
        return f"`teacher_server_url={args.teacher_server_url!r}`"
    return f"`teacher_offload={args.teacher_offload!r}`"


def prompts_of_step(args: DistillationConfig) -> int:
    """Prompts of an optimizer step, over all processes."""
    return _rows_of_step(args) // args.num_generations


def batch_in_words(args: DistillationConfig) -> str:
    """The same with the numbers that it comes from."""
    each = "" if args.num_generations == 1 else f" / {args.num_generations} completions of each"
    return f"{prompts_of_step(args)} = {_factors(args)}{each}"


def _rows_of_step(args: DistillationConfig) -> int:
    return int(args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps)


def _factors(args: DistillationConfig) -> str:
    return (
        f"{args.per_device_train_batch_size} per device x {args.world_size} processes x "
        f"{args.gradient_accumulation_steps} accumulation steps"
    )


def _all_alike(args: Any) -> str:
    """Why a prompt is always completed in the same way; empty if it is not."""
    given = args.generation_kwargs or {}
    if given.get("top_k", args.top_k) == 1:
        return "only the likeliest token is kept (`top_k=1`)"
    if given.get("do_sample") is False and not args.has_engine:
        return "decoding is greedy"
    if args.has_engine and given.get("temperature") == 0:
        return "decoding is greedy"
    return "each row is written with this seed" if args.has_engine and given.get("seed") is not None else ""
