"""Finds options that are set and have no effect beside the others, so that a user can be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.course import STEPS
from trl_opsd.run.objective_options import unread_objective
from trl_opsd.run.reward_options import unread_rewards
from trl_opsd.run.training_options import EVERY

_SERVER = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
)
_COLOCATED = ("vllm_gpu_memory_utilization", "vllm_model_impl", "vllm_tensor_parallel_size")
_VLLM = (
    "vllm_mode",
    "vllm_enable_sleep_mode",
    "vllm_structured_outputs_regex",
    "vllm_weight_sync",
    *_SERVER,
    *_COLOCATED,
)
_ENGINE = ("vllm_max_model_length", "vllm_sync_check")
"""Options of vLLM that SGLang has as well."""
_AVERAGE = ("teacher_update_rate", "teacher_sync_steps")
_LOADED = ("teacher_model_revision", "teacher_trust_remote_code")
_OPTIMIZER = (
    "learning_rate",
    "optim",
    "optim_args",
    "optim_target_modules",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
_SCHEDULER = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")


def without_effect(
    args: DistillationConfig,
    *,
    own_rollout: bool,
    teachers: Sequence[Any],
    optimizers: tuple[Any, Any],
    tools: Any,
    divergence: Any = None,
    rewards: int = 0,
) -> dict[str, str]:
    """The options that differ from their defaults and are not read, each with the reason.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.
        own_rollout (`bool`):
            Whether a rollout was passed, which may read any option.
        teachers (`Sequence`):
            The teachers as they were passed; `None` is the student itself.
        optimizers (`tuple`):
            The optimizer and the scheduler that were passed.
        tools (`Any`):
            The tools that were passed.
        divergence (`Any`, *optional*):
            The one that was passed, which overrides that of the options.
        rewards (`int`, *optional*, defaults to 0):
            Number of reward functions that were passed.
    """
    found: dict[str, str] = {}
    for names, reason in chain(
        unread_objective(args, divergence),
        unread_rewards(args, rewards),
        _unread(args, own_rollout, teachers, optimizers, tools),
    ):
        changed = [name for name in names if getattr(args, name) != getattr(type(args), name)]
        found.update({name: reason for name in changed if name not in found})
    return found


def described(args: DistillationConfig, found: dict[str, str]) -> str:
    """What [`without_effect`] has found, as one sentence."""
    values = {name: getattr(args, name) for name in found}
    shown = {name: repr(getattr(value, "value", value)) for name, value in values.items()}  # an enum by its value
    options = "; ".join(f"`{name}={shown[name]}`, because {reason}" for name, reason in found.items())
    return f"Options without effect: {options}."


def _unread(
    args: DistillationConfig, own_rollout: bool, teachers: Sequence[Any], optimizers: tuple[Any, Any], tools: Any
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Options that are not read, and why."""
    if not own_rollout:
        if not args.use_vllm:
            yield _VLLM, "`use_vllm` is False"
        elif args.vllm_mode == "colocate":
            yield _SERVER, "`vllm_mode='colocate'` needs no server"
        else:
            yield _COLOCATED, "`vllm_mode='server'`: the server is started with options of its own"
            if args.vllm_server_base_url is not None:
                yield ("vllm_server_host", "vllm_server_port"), "`vllm_server_base_url` says where the server is"
        if args.sglang_server_url is None:
            yield ("sglang_server_timeout",), "`sglang_server_url` is not set"
        if args.has_engine:
            yield ("cache_implementation",), "an engine writes the completions"
        else:
            yield _ENGINE, "`use_vllm` is False"
    if args.nonfinite == "raise" and args.mixed_precision != "fp16":
        yield ("nonfinite_skip_limit",), "`nonfinite` is 'raise'"
    if args.collapse_guard == "stop" and 0 < args.max_steps < 2 * STEPS:
        yield ("collapse_guard",), f"the first {2 * STEPS} steps are compared with nothing"
    if args.teacher_server_url is None:
        yield ("teacher_server_timeout",), "`teacher_server_url` is not set"
    if args.teacher_model_kind != "ema":
        yield _AVERAGE, "`teacher_model_kind` is not 'ema'"
    if not any(isinstance(teacher, str) for teacher in teachers):
        yield _LOADED, "no teacher is loaded from a path"
    if args.teacher_model_kind is not None:
        yield ("teacher_model_init_kwargs",), "the student is its own teacher"
    optimizer, scheduler = optimizers
    if optimizer is not None:
        yield _OPTIMIZER, "an optimizer was passed"
    if scheduler is not None:
        yield _SCHEDULER, "a scheduler was passed"
    for name, strategy in EVERY.items():
        if getattr(args, strategy) != "steps":
            yield (name,), f"`{strategy}` is not 'steps'"
    if args.eval_strategy == "no":
        yield ("eval_delay", "metric_for_best_model"), "`eval_strategy` is 'no'"
    if args.save_strategy == "no" and not args.enable_jit_checkpoint:
        yield ("save_total_limit", "save_only_model"), "`save_strategy` is 'no'"
    if not args.log_completions:
        yield ("num_completions_to_print", "log_unique_prompts"), "`log_completions` is False"
    if args.overlap != "step":
        yield ("deterministic",), "`overlap` is not 'step'"
    if args.overlap != "ahead":
        yield ("overlap_max_divergence",), "`overlap` is not 'ahead'"
    if not tools:
        yield ("max_tool_calling_iterations",), "there are no tools"
