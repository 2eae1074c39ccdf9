"""Checks the options of steps that overlap, and of optimizers that cannot wait for the end of a step."""

from __future__ import annotations

from transformers.training_args import OptimizerNames

from trl_opsd._compat.deepspeed import setting_without_loss_scale
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import above, one_of

__all__ = ["OVERLAPS", "check_optimizer", "check_overlap"]

OVERLAPS = ("step", "ahead")


def check_overlap(args: DistillationConfig) -> None:
    """Refuses what cannot overlap.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: `overlap` is unknown, or contradicts another option.
    """
    one_of("overlap", args.overlap, (None, *OVERLAPS))
    above("overlap_max_divergence", args.overlap_max_divergence, 0.0)
    if args.overlap is None:
        return
    asked = f"`overlap={args.overlap!r}`"
    if args.use_vllm and args.vllm_mode == "colocate":
        sleeps = " and sleeps while that trains" if args.vllm_enable_sleep_mode else ""
        raise ValueError(
            f"{asked} with `vllm_mode='colocate'`, whose engine writes in the trainer's own process{sleeps}: set "
            "`vllm_mode='server'`, or leave `overlap` out."
        )
    if args.overlap == "ahead":
        return
    check_optimizer(args, "overlap")
    plugin = args.deepspeed_plugin
    if plugin is not None and (setting := setting_without_loss_scale(plugin.deepspeed_config)):
        raise ValueError(
            f"{asked} with DeepSpeed and this value of {setting!r}: the number of tokens in the loss is known at the "
            "end of a step, and only its optimizers of ZeRO stage 1 to 3 can be told then: set one of those, and leave "
            "`grad_accum_dtype` out."
        )


def check_optimizer(args: DistillationConfig, option: str) -> None:
    """Refuses optimizers that step in each backward pass, beside an option that adds backward passes.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.
        option (`str`):
            The name of that option.

    Raises:
        ValueError: `optim` is such an optimizer.
    """
    optim = OptimizerNames(args.optim).value
    if "lomo" in optim or "layerwise" in optim:
        raise ValueError(
            f"`{option}` with `optim={optim!r}`, which steps in each backward pass: leave one of them out."
        )
