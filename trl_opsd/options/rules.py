"""Options that cannot go together, each with the reason, and how many prompts make an optimizer step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.training_args import OptimizerNames

from trl_opsd._compat.deepspeed import setting_without_loss_scale
from trl_opsd._compat.sharding import launched

Refusal: TypeAlias = tuple[Any, str, str]
"""Whether it is met, what meets, and why that cannot be."""


def refuse(found: Iterable[Refusal]) -> None:
    """Raises `ValueError` for the first that is met."""
    for is_met, what, why in found:
        if is_met:
            raise ValueError(f"{what}: {why}.")


def shown(args: Any, *names: str) -> str:
    """Options with their values, as in `OPSDConfig(...)`; an enum by its value."""
    values = {name: getattr(args, name) for name in names}
    return " with ".join(f"`{name}={getattr(value, 'value', value)!r}`" for name, value in values.items())


# ---- The launch, before accelerate is started -----------------------------------------------------------------------

_OF_WHOLE_ROWS = ("padding_free", "pad_to_multiple_of", "torch_compile", "teacher_prefix_cache_gb")
"""Options that need whole rows in a process."""


def check_launch(args: Any) -> None:
    """Refuses parallelism in which processes would train on the wrong parts of rows."""
    sizes, processes = launched(args), int(os.environ.get("WORLD_SIZE", "1"))
    split, groups = f"`sp_size={sizes.sp_size}`", processes // sizes.sp_size
    with_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    found: list[Refusal] = [
        (
            sizes.tp_size > 1 or sizes.cp_size > 1,
            "`tp_size` or `cp_size` above 1",
            "tensor parallelism and context parallelism are not supported; use `sp_size` or `dp_shard_size`",
        )
    ]
    if sizes.sp_enabled:
        found += [
            (not with_deepspeed, split, "it needs DeepSpeed: launch with `accelerate_configs/sp.yaml`"),
            (
                processes % sizes.sp_size or sizes.data_parallel_size not in (1, groups),
                f"{split} on {processes} processes with a data parallel size of {sizes.data_parallel_size}",
                "expected a divisor of `num_processes`; remove `dp_replicate_size` and `dp_shard_size`",
            ),
            (
                not sizes.sp_handler.sp_seq_length_is_variable,
                f"{split} with `sp_seq_length`",
                "rows differ in length; remove it",
            ),
            *(
                (
                    getattr(args, name) not in (None, "auto", False, 0),
                    f"{split} with {shown(args, name)}",
                    "needs whole rows",
                )
                for name in _OF_WHOLE_ROWS
            ),
        ]
    refuse(found)


# ---- Options, once transformers has read them -----------------------------------------------------------------------


def check_together(args: Any) -> None:
    """Refuses options that would cancel each other, train on something else, or never end."""
    optimizer, plugin, several = str(OptimizerNames(args.optim).value), args.deepspeed_plugin, args.world_size > 1
    steps_at_once = "lomo" in optimizer or "layerwise" in optimizer
    file_of_launch, launch = args.accelerator_config, int(os.environ.get("WORLD_SIZE", "1"))
    without_scale = plugin is not None and setting_without_loss_scale(plugin.deepspeed_config)
    generates = "the teacher generates, which needs its whole weights in each process"
    rows = rows_of_step(args)
    refuse(
        [
            # the teacher
            (
                args.teacher_offload == "zero3" and args.teacher_model_kind == "ema",
                shown(args, "teacher_offload", "teacher_model_kind"),
                "each process keeps the whole average; set 'cpu' or 'stream'",
            ),
            (
                args.teacher_offload == "zero3" and not is_deepspeed_zero3_enabled(),
                shown(args, "teacher_offload"),
                "the launch has no DeepSpeed ZeRO-3; use one with `zero_stage: 3`, or set `teacher_offload='stream'`",
            ),
            (
                args.seq_kd and args.lmbda == 1,
                shown(args, "seq_kd", "lmbda"),
                "the teacher would complete no row; set `lmbda=0.5` for half of them, as in TRL's GKD, or 0 for all",
            ),
            (args.seq_kd and args.teacher_server_url is not None, "`seq_kd=True` with `teacher_server_url`", generates),
            (
                args.seq_kd and args.teacher_offload in ("stream", "zero3"),
                shown(args, "seq_kd", "teacher_offload"),
                f"{generates}; set 'none' or 'cpu'",
            ),
            # the step
            (
                rows % args.num_generations,
                f"{shown(args, 'num_generations')} with {_factors(args)} = {rows} rows",
                "a step has all completions of a prompt; set a divisor, or change the batch size",
            ),
            (args.overlap and args.lmbda < 1, shown(args, "lmbda", "overlap"), "is not supported; remove one of them"),
            (
                args.overlap and args.use_vllm and args.vllm_mode == "colocate",
                shown(args, "overlap", "vllm_mode"),
                "the engine sleeps while the student trains; set `vllm_mode='server'`",
            ),
            (
                args.overlap == "step" and without_scale,
                f"{shown(args, 'overlap')} with DeepSpeed's {without_scale!r}",
                "gradients are rescaled at the end of a step; use its ZeRO stage 1 to 3 with defaults",
            ),
            *(
                (steps_at_once and is_given, shown(args, "optim", name), "`optim` steps in each backward; remove one")
                for name, is_given in (
                    ("max_tokens_per_microbatch", args.max_tokens_per_microbatch),
                    ("overlap", args.overlap == "step"),
                )
            ),
            # options of transformers and the launch
            (
                args.auto_find_batch_size,
                "`auto_find_batch_size=True`",
                "when out of memory it would restart with other rows; remove it",
            ),
            *(
                (args.torch_compile and is_met, f"`torch_compile=True` with {what}", why)
                for is_met, what, why in (
                    (
                        is_deepspeed_zero3_enabled(),
                        "DeepSpeed ZeRO-3",
                        "it gathers weights inside of the layers that would be compiled; use ZeRO-2 or FSDP2",
                    ),
                    (
                        args.teacher_prefix_cache_gb,
                        shown(args, "teacher_prefix_cache_gb"),
                        "torch would compile once per layer; remove one of them",
                    ),
                    (
                        args.torch_compile_mode in ("reduce-overhead", "max-autotune"),
                        shown(args, "torch_compile_mode"),
                        "CUDA graphs need weights and shapes that stay; set 'max-autotune-no-cudagraphs', or no mode",
                    ),
                )
            ),
            (
                args.fp16_full_eval or args.bf16_full_eval,
                "`fp16_full_eval` or `bf16_full_eval`",
                "an evaluation would cast the student for good; remove it, or set `bf16=True`",
            ),
            (
                file_of_launch.dispatch_batches
                or (several and (file_of_launch.split_batches or not file_of_launch.even_batches)),
                "`dispatch_batches`, `split_batches` or no `even_batches` in `accelerator_config`",
                "processes would get other rows than their own; remove it",
            ),
            (
                not getattr(args, "dataloader_in_order", True) and args.dataloader_num_workers,
                "`dataloader_in_order=False`",
                "rows of a step could be used twice or never; remove it",
            ),
            (
                args.mixed_precision == "fp16" and args.device.type == "cpu" and args.deepspeed_plugin is None,
                "`fp16=True` on a CPU",
                "it has no float16 loss scaler; set `bf16=True`, or neither for float32",
            ),
            (
                launch > 1 and args.world_size == 1,
                f"{launch} processes were launched (`WORLD_SIZE`), and accelerate sees one",
                "each would train its own student; without an accelerator set `use_cpu=True`",
            ),
        ]
    )


# ---- The rows of a step ---------------------------------------------------------------------------------------------


def rows_of_step(args: Any) -> int:
    """Completions of an optimizer step, over all processes."""
    return int(args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps)


def prompts_of_step(args: Any) -> int:
    """Prompts of an optimizer step, over all processes."""
    return rows_of_step(args) // int(args.num_generations)


def batch_in_words(args: Any) -> str:
    """The same with its factors."""
    each = "" if args.num_generations == 1 else f" / {args.num_generations} completions of each"
    return f"{prompts_of_step(args)} = {_factors(args)}{each}"


def _factors(args: Any) -> str:
    return (
        f"{args.per_device_train_batch_size} per device x {args.world_size} processes x "
        f"{args.gradient_accumulation_steps} accumulation steps"
    )


def check_train_size(dataset: Any, args: Any) -> None:
    """Refuses a dataset that does not fill one optimizer step, and a stream without `max_steps`."""
    if isinstance(dataset, IterableDataset) and args.max_steps <= 0:
        raise ValueError(f"{shown(args, 'max_steps')}: `train_dataset` is a stream; set the number of optimizer steps.")
    if isinstance(dataset, Dataset) and len(dataset) < prompts_of_step(args):
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but one generation batch needs {batch_in_words(args)}, and "
            "incomplete batches are dropped, so there would be 0 steps: add rows, or lower one of those numbers."
        )
