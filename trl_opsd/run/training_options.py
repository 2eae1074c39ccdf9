"""Checks the options of transformers' training loop; zeros are for `arguments.py`.

A rate or a number of epochs of 0 is of no concern to a trainer that only evaluates.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import at_least, at_least_one, in_range

_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "ddp_timeout")
_AT_LEAST_0 = (
    "learning_rate",
    "num_train_epochs",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "adam_epsilon",
    "dataloader_num_workers",
    "eval_delay",
)
_AT_LEAST_0_OR_NONE = ("save_total_limit", "max_tool_calling_iterations", "num_completions_to_print")
EVERY = {"logging_steps": "logging_strategy", "save_steps": "save_strategy", "eval_steps": "eval_strategy"}
"""Intervals, and the option that switches each on with `"steps"`."""


def check_training(args: DistillationConfig) -> None:
    """Checks batches, steps, rates and intervals.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options, before transformers has read them.

    Raises:
        ValueError: An option is out of range.
    """
    folder = Path(args.output_dir or ".").absolute()
    if file := next((one for one in (folder, *folder.parents) if one.is_file()), None):
        raise ValueError(f"`output_dir={args.output_dir!r}`: {str(file)!r} is a file: name a folder.")
    for name in _COUNTS:
        at_least_one(name, getattr(args, name))
    for name in _AT_LEAST_0:
        at_least(name, getattr(args, name), 0)
    for name in _AT_LEAST_0_OR_NONE:
        if getattr(args, name) is not None:
            at_least(name, getattr(args, name), 0)
    for name in ("adam_beta1", "adam_beta2"):
        in_range(name, getattr(args, name), 0, 1)
    if args.eval_accumulation_steps is not None:
        at_least_one("eval_accumulation_steps", args.eval_accumulation_steps)
    if args.max_steps < -1:
        raise ValueError(
            f"`max_steps={args.max_steps}`: expected the number of optimizer steps, or -1, where `num_train_epochs` "
            "decides."
        )
    for name, strategy in EVERY.items():
        value = getattr(args, name)
        unset = name == "eval_steps" and not value  # then it is `logging_steps`
        if _word(getattr(args, strategy)) == "steps" and not unset:
            _check_interval(name, value)
    _check_seed(args.seed)


def _check_interval(name: str, value: Any) -> None:
    at_least(name, value, 0)
    if value == 0 or (value > 1 and value != int(value)):
        raise ValueError(
            f"`{name}={value!r}`: expected a number of optimizer steps, or below 1 a share of all of them."
        )


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed={seed!r}`: expected an integer from 0 to 4294967295, which is what NumPy takes.")


def _word(strategy: Any) -> str:
    """The name of a strategy, which is a text before transformers has read it and an enum after."""
    return str(getattr(strategy, "value", strategy))


def check_unsupported(args: DistillationConfig) -> None:
    """Refuses options that have no effect here, or another than their name says.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: Such an option is set.
    """
    if args.auto_find_batch_size:
        raise ValueError(
            "`auto_find_batch_size=True` would restart with another generation batch after an out-of-memory error: "
            "set `per_device_train_batch_size` and `gradient_accumulation_steps` to what fits."
        )
    if args.label_smoothing_factor:
        raise ValueError(
            f"`label_smoothing_factor={args.label_smoothing_factor}` has no effect: there are no labels; remove it."
        )
    if args.train_sampling_strategy != "random":
        raise ValueError(
            f"`train_sampling_strategy={args.train_sampling_strategy!r}` has no effect: the length of a completion "
            "is not known before it is generated, and `shuffle_dataset=False` keeps the order; remove it."
        )
    if args.torch_compile:
        raise ValueError(
            "`torch_compile=True` compiles a `forward` that is not called, neither to write completions nor in the "
            "loss, which form no logits there: remove it; `rollout=HFRollout(compile=True)` compiles decoding."
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            raise ValueError(
                f"`{name}=True` would cast the student's weights for an evaluation and leave them so: set `bf16=True`, "
                "which computes in bfloat16, and remove it."
            )
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and args.world_size == 1:
        raise ValueError(
            f"The launch has {launched} processes (`WORLD_SIZE`), but accelerate counts one, so that each would train "
            "a student of its own: on a machine without an accelerator set `use_cpu=True`."
        )
    if args.data_seed is not None:
        warnings.warn(f"`data_seed={args.data_seed}` is ignored: `seed` decides the order.", stacklevel=5)


def check_accumulation(args: DistillationConfig) -> None:
    """Compares the accumulation steps with those of the launch before the student is loaded; transformers does after.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.

    Raises:
        ValueError: They differ.
    """
    theirs = args.deepspeed_plugin.deepspeed_config if args.deepspeed_plugin else {}
    steps = theirs.get("gradient_accumulation_steps", "auto")
    if steps not in ("auto", args.gradient_accumulation_steps):
        raise ValueError(
            f"`gradient_accumulation_steps` is {steps} in the accelerate or DeepSpeed file and "
            f"{args.gradient_accumulation_steps} in `OPSDConfig`: remove it from the file."
        )
