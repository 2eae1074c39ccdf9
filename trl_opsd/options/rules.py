"""What options may not be together, and what surprises: each rule is a condition and its message.

A rule's message is a format: `{0.lmbda}` is an option, `{1}` is what the condition has returned. Which values a single
option may have stands in `table.py`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.training_args import OptimizerNames

from trl_opsd._compat.deepspeed import setting_without_loss_scale
from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.losses import Divergence, GeneralizedJSD
from trl_opsd.losses.divergence import describe
from trl_opsd.losses.registry import BETAS
from trl_opsd.options.values import at_least

__all__ = ["AFTER", "BEFORE", "EVALUATION", "TRAINING", "Rule", "batch_in_words", "prompts_of_step", "refuse"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that is refused, or warned of."""

    broken: Callable[[Any], Any]
    """Anything true if the rule is broken by the options, or by what else it is asked of."""
    message: str
    warns: bool = False


def refuse(rules: Iterable[Rule], given: Any, warn: Callable[[str], object] | None = None) -> None:
    """Raises `ValueError` for the first rule that is broken; of rules that warn, passes all messages on."""
    for rule in rules:
        if found := rule.broken(given):
            message = rule.message.format(given, found)
            if not rule.warns:
                raise ValueError(message)
            (warn or partial(warnings.warn, stacklevel=4))(message)  # where the config is made


# ---- The rows of a step ---------------------------------------------------------------------------------------------


def prompts_of_step(args: DistillationConfig) -> int:
    """Prompts of an optimizer step, over all processes."""
    return _rows_of_step(args) // int(args.num_generations)


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


def _uneven_groups(args: DistillationConfig) -> str:
    rows = _rows_of_step(args)
    return f"{rows} = {_factors(args)}" if rows % args.num_generations else ""


# ---- Before transformers reads the options --------------------------------------------------------------------------


def _file_above(args: DistillationConfig) -> str:
    folder = Path(args.output_dir or ".").absolute()
    return next((repr(str(one)) for one in (folder, *folder.parents) if one.is_file()), "")


def _interval(name: str, strategy: str) -> Rule:
    def broken(args: DistillationConfig) -> bool:
        every, kind = getattr(args, name), getattr(args, strategy)
        if getattr(kind, "value", kind) != "steps" or (name == "eval_steps" and not every):  # then `logging_steps`
            return False
        return not (at_least(0).fits(every) and every and (every < 1 or every == int(every)))

    expected = "expected a number of optimizer steps, or below 1 a share of all of them."
    return Rule(broken, f"`{name}={{0.{name}!r}}`: {expected}")


BEFORE = (
    Rule(_file_above, "`output_dir={0.output_dir!r}`: {1} is a file: name a folder."),
    _interval("logging_steps", "logging_strategy"),
    _interval("save_steps", "save_strategy"),
    _interval("eval_steps", "eval_strategy"),
)
"""Of options as they are given."""


# ---- After transformers has read the options ------------------------------------------------------------------------


def _ignored_beta(args: DistillationConfig) -> str:
    """The divergence that is chosen otherwise, beside a `beta` that was set."""
    default = type(args).beta
    if args.divergence in (None, "jsd") or args.beta in (default, BETAS.get(str(args.divergence), default)):
        return ""
    return describe(args.divergence) if isinstance(args.divergence, Divergence) else repr(args.divergence)


def _vanishes(args: DistillationConfig) -> bool:
    objective = args.build_divergence()
    return isinstance(objective, GeneralizedJSD) and not 0.05 <= objective.beta <= 0.95


def _steps_in_backward(args: DistillationConfig) -> str:
    optim = str(OptimizerNames(args.optim).value)
    return optim if "lomo" in optim or "layerwise" in optim else ""


def _accumulation_of_file(args: DistillationConfig) -> Any:
    theirs = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    steps = theirs.get("gradient_accumulation_steps", "auto")
    return steps not in ("auto", args.gradient_accumulation_steps) and steps


def _all_alike(args: DistillationConfig) -> str:
    """Why a prompt is always completed in the same way; empty if it is not."""
    given = args.generation_kwargs or {}
    if given.get("top_k", args.top_k) == 1:
        return "only the likeliest token is kept (`top_k=1`)"
    if given.get("temperature") == 0 if args.has_engine else given.get("do_sample") is False:
        return "decoding is greedy"
    return "each row is written with this seed" if args.has_engine and given.get("seed") is not None else ""


def _several_alike(name: str) -> Rule:
    return Rule(
        lambda args: (getattr(args, name) or 1) > 1 and _all_alike(args),
        f"`{name}={{0.{name}}}` with `generation_kwargs={{0.generation_kwargs}}`: {{1}}, so that all completions of a "
        "prompt are the same: remove one of them.",
    )


def _cast_for_evaluations(name: str) -> Rule:
    return Rule(
        lambda args: getattr(args, name),
        f"`{name}=True` would cast the student's weights for an evaluation and leave them so: set `bf16=True`, which "
        "computes in bfloat16, and remove it.",
    )


def _moved_teacher(key: str, why: str) -> Rule:
    return Rule(
        lambda args: args.teacher_offload != "none" and (args.teacher_model_init_kwargs or {}).get(key) is not None,
        f"`teacher_offload={{0.teacher_offload!r}}` with `{key}` in `teacher_model_init_kwargs`: {why}: remove it, or "
        "leave `teacher_offload='none'`.",
    )


def _rows_twice(name: str, value: bool, why: str, on_one: bool = False) -> Rule:
    return Rule(
        lambda args: getattr(args.accelerator_config, name) is value and (on_one or args.world_size > 1),
        f"`accelerator_config`: `{name}={value}` on {{0.world_size}} processes: {why}.",
    )


def _without_loss_scale(args: DistillationConfig) -> Any:
    plugin = args.deepspeed_plugin
    return args.overlap == "step" and plugin is not None and setting_without_loss_scale(plugin.deepspeed_config)


def _launched(args: DistillationConfig) -> int:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return processes if processes > 1 and args.world_size == 1 else 0


TRAINING = (
    Rule(
        _accumulation_of_file,
        "`gradient_accumulation_steps` is {1} in the accelerate or DeepSpeed file and {0.gradient_accumulation_steps} "
        "in `OPSDConfig`: remove it from the file.",
    ),
)
"""Of options that may be changed between two trainings."""

EVALUATION = (
    Rule(
        lambda args: (
            args.eval_temperature == 0
            and (several := args.num_generations_eval or args.num_generations) > 1
            and several
        ),
        "`eval_temperature=0` with {1} completions of each prompt of an evaluation, which are then the same: set "
        "`num_generations_eval=1`, or a temperature above 0.",
    ),
)
"""Of options that may be changed between two evaluations."""

AFTER = (
    # what is learned
    Rule(
        lambda args: args.padding_free and args.pad_to_multiple_of is not None,
        "`padding_free=True` with `pad_to_multiple_of={0.pad_to_multiple_of}`: no row is padded then; set only one of "
        "them.",
    ),
    Rule(
        _ignored_beta,
        "`divergence={1}` decides the objective; `beta={0.beta}` is ignored: set only one.",
        warns=True,
    ),
    Rule(
        _vanishes,
        "`beta={0.beta}` is close to an end of (0, 1), where the generalised JSD and its gradient vanish; it does not "
        "become a KL there. For a KL set `divergence='forward_kl'` or 'reverse_kl'.",
        warns=True,
    ),
    Rule(
        lambda args: args.max_tokens_per_microbatch is not None and _steps_in_backward(args),
        "`max_tokens_per_microbatch` with `optim={1!r}`, which steps in each backward pass: leave one of them out.",
    ),
    # the teacher
    _moved_teacher(
        "quantization_config", "quantised weights carry state that belongs to the device they were created on"
    ),
    _moved_teacher("device_map", "accelerate would already move the weights"),
    _moved_teacher("tp_plan", "the weights would already be sharded"),
    Rule(
        lambda args: args.teacher_offload == "zero3" and not is_deepspeed_zero3_enabled(),
        "`teacher_offload='zero3'`: this process was not launched with DeepSpeed ZeRO-3, so the teacher cannot be "
        "sharded: start with `accelerate launch` and a config of `zero_stage: 3`, or set `teacher_offload='stream'`.",
    ),
    # engines
    Rule(
        lambda args: args.use_vllm and args.sglang_server_url is not None,
        "`sglang_server_url={0.sglang_server_url!r}` and `use_vllm=True`: two engines cannot write the same "
        "completions: leave one of them out.",
    ),
    Rule(
        lambda args: (
            not args.ds3_gather_for_generation
            and args.has_engine
            and ("use_vllm=True" if args.use_vllm else "sglang_server_url")
        ),
        "`ds3_gather_for_generation=False` cannot be used with `{1}`, the weights have to be gathered to be sent to "
        "it: remove it.",
    ),
    # what has no effect here, or another than its name says
    Rule(
        lambda args: args.auto_find_batch_size,
        "`auto_find_batch_size=True` would restart with another generation batch after an out-of-memory error: set "
        "`per_device_train_batch_size` and `gradient_accumulation_steps` to what fits.",
    ),
    Rule(
        lambda args: args.label_smoothing_factor,
        "`label_smoothing_factor={0.label_smoothing_factor}` has no effect: there are no labels; remove it.",
    ),
    Rule(
        lambda args: args.train_sampling_strategy != "random",
        "`train_sampling_strategy={0.train_sampling_strategy!r}` has no effect: the length of a completion is not "
        "known before it is generated, and `shuffle_dataset=False` keeps the order; remove it.",
    ),
    Rule(
        lambda args: args.torch_compile,
        "`torch_compile=True` compiles a `forward` that is not called, neither to write completions nor in the loss, "
        "which form no logits there: remove it; `rollout=HFRollout(compile=True)` compiles decoding.",
    ),
    _cast_for_evaluations("fp16_full_eval"),
    _cast_for_evaluations("bf16_full_eval"),
    Rule(
        lambda args: args.data_seed is not None, "`data_seed={0.data_seed}` is ignored: `seed` decides the order.", True
    ),
    # the launch
    Rule(
        _launched,
        "The launch has {1} processes (`WORLD_SIZE`), but accelerate counts one, so that each would train a student of "
        "its own: on a machine without an accelerator set `use_cpu=True`.",
    ),
    *TRAINING,
    _rows_twice(
        "split_batches",
        True,
        "it cuts through the rows of an optimizer step; lower `per_device_train_batch_size` instead",
    ),
    _rows_twice("dispatch_batches", True, "it sends rows as tensors, and prompts are text; remove it", on_one=True),
    _rows_twice(
        "even_batches", False, "one would end an evaluation before the others; remove it, no row is counted twice"
    ),
    Rule(
        # transformers before 5.15 is always in order
        lambda args: not getattr(args, "dataloader_in_order", True) and args.dataloader_num_workers,
        "`dataloader_in_order=False` would let batches overtake each other, so that rows of an optimizer step are read "
        "twice or never: remove it.",
    ),
    Rule(
        lambda args: args.mixed_precision == "fp16" and args.device.type == "cpu" and args.deepspeed_plugin is None,
        "`fp16=True` (or `mixed_precision: fp16` in the accelerate file) on a CPU, where there is no loss scaler for "
        "float16: set `bf16=True`, or neither for float32.",
    ),
    # steps that overlap
    Rule(
        lambda args: (
            args.overlap is not None
            and args.use_vllm
            and args.vllm_mode == "colocate"
            and ("process and sleeps while that trains" if args.vllm_enable_sleep_mode else "process")
        ),
        "`overlap={0.overlap!r}` with `vllm_mode='colocate'`, whose engine writes in the trainer's own {1}: set "
        "`vllm_mode='server'`, or leave `overlap` out.",
    ),
    Rule(
        lambda args: args.overlap == "step" and _steps_in_backward(args),
        "`overlap` with `optim={1!r}`, which steps in each backward pass: leave one of them out.",
    ),
    Rule(
        _without_loss_scale,
        "`overlap='step'` with DeepSpeed and this value of {1!r}: the number of tokens in the loss is known at the end "
        "of a step, and only its optimizers of ZeRO stage 1 to 3 can be told then: set one of those, and leave "
        "`grad_accum_dtype` out.",
    ),
    # who writes completions, and how many
    Rule(
        lambda args: args.seq_kd and args.lmbda == 1,
        "`seq_kd=True` with `lmbda=1`, the default: the teacher would write for no row. Set `lmbda=0.5`, for half of "
        "them, as in TRL's GKD trainer, or 0, for all.",
    ),
    Rule(
        lambda args: args.seq_kd and args.teacher_server_url is not None,
        "`seq_kd=True` with `teacher_server_url={0.teacher_server_url!r}`: completions are written by a whole teacher "
        "in each process. Have it write them before, into a column 'completion'.",
    ),
    Rule(
        lambda args: args.seq_kd and args.teacher_offload in ("stream", "zero3"),
        "`seq_kd=True` with `teacher_offload={0.teacher_offload!r}`: completions are written by a whole teacher in "
        "each process. Set `teacher_offload='none'` or 'cpu', or write them before, into a column 'completion'.",
    ),
    Rule(
        lambda args: args.lmbda < 1 and args.overlap is not None,
        "`lmbda={0.lmbda}` with `overlap={0.overlap!r}` is not supported: set `lmbda=1`, or leave `overlap` out.",
    ),
    Rule(
        lambda args: args.lmbda < 1 and args.num_generations > 1 and not args.seq_kd,
        "`lmbda={0.lmbda}` with `num_generations={0.num_generations}`: the completion of the dataset may be learned "
        "several times in a step. Set one of them to 1.",
        warns=True,
    ),
    Rule(
        _uneven_groups,
        "`num_generations={0.num_generations}`: a generation batch has {1} rows, which have to be whole groups of "
        "completions of one prompt: set a divisor of that number, or other numbers.",
    ),
    _several_alike("num_generations"),
    _several_alike("num_generations_eval"),
    *EVALUATION,
    # rewards
    Rule(
        lambda args: args.reward_weight and args.num_generations < 2,
        "`reward_weight={0.reward_weight}` with `num_generations={0.num_generations}`: a reward counts relative to "
        "those of the other completions of its prompt, and there are none: set `num_generations` to 2 or more (TRL's "
        "GRPO has 8).",
    ),
    Rule(
        lambda args: args.reward_weight and args.lmbda == 0,
        "`reward_weight={0.reward_weight}` with `lmbda=0`: rewards are for what the student writes, which is nothing: "
        "set a higher `lmbda`, or leave `reward_weight` out.",
    ),
    Rule(
        lambda args: args.reward_weight and args.overlap == "step",
        "`reward_weight={0.reward_weight}` with `overlap='step'`: a row is learned before the other completions of its "
        "prompt have ended, whose rewards it is held against: leave `overlap` out, or set `overlap='ahead'`.",
    ),
)
"""Of options as they are read."""
