"""Checks the options of the teacher: which model it is, where its weights are kept, and which servers have them."""

from __future__ import annotations

from transformers.integrations import is_deepspeed_zero3_enabled

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.data.solutions import named_as_here
from trl_opsd.data.teacher_prompts import check_template
from trl_opsd.run.ranges import at_least, at_least_one, in_range, one_of
from trl_opsd.run.server_urls import server_urls

__all__ = ["check_teacher", "check_teacher_placement"]

_OFFLOADS = ("none", "cpu", "stream", "zero3")

_ONLY_RESIDENT = {
    "quantization_config": "quantised weights carry state that belongs to the device they were created on",
    "device_map": "accelerate would already move the weights",
    "tp_plan": "the weights would already be sharded",
}
"""Loading options after which a teacher must stay on the device it was loaded on, with the reason."""


def check_teacher(args: DistillationConfig) -> None:
    """Refuses a teacher that does not exist; takes TRL's name of a column in its template for ours.

    Raises:
        ValueError: An option is out of range, unknown, or contradicts another.
    """
    one_of("teacher_model_kind", args.teacher_model_kind, (None, "base", "ema", "live"))
    in_range("teacher_update_rate", args.teacher_update_rate, 0.0, 1.0, open_below=True)
    at_least_one("teacher_sync_steps", args.teacher_sync_steps)
    args.teacher_prompt_template = named_as_here(args.teacher_prompt_template)
    check_template(args.teacher_prompt_template)


def check_teacher_placement(args: DistillationConfig) -> None:
    """Refuses a place for the teacher's weights that its loading options or this launch do not allow.

    Raises:
        ValueError: An option is out of range, unknown, or contradicts another.
    """
    one_of("teacher_offload", args.teacher_offload, _OFFLOADS)
    one_of("teacher_cache_device", args.teacher_cache_device, ("auto", "cpu", "accelerator"))
    server_urls("teacher_server_url", args.teacher_server_url)
    at_least("teacher_server_timeout", args.teacher_server_timeout, 0)
    if args.teacher_offload == "none":
        return
    offload = f"`teacher_offload={args.teacher_offload!r}`"
    for name, reason in _ONLY_RESIDENT.items():
        if (args.teacher_model_init_kwargs or {}).get(name) is not None:
            raise ValueError(
                f"{offload} with `{name}` in `teacher_model_init_kwargs`: {reason}: remove it, or leave "
                "`teacher_offload='none'`."
            )
    if args.teacher_offload == "zero3" and not is_deepspeed_zero3_enabled():
        raise ValueError(
            f"{offload}: this process was not launched with DeepSpeed ZeRO-3, so the teacher cannot be sharded: "
            "start with `accelerate launch` and a config of `zero_stage: 3`, or set `teacher_offload='stream'`."
        )
