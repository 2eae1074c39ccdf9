"""Checks the options of the training loop that transformers accepts as they are; zeros are for `arguments.py`.

A rate or a number of epochs of 0 is of no concern to a trainer that only evaluates.
"""

from __future__ import annotations

from typing import Any

from trl_opsd._compat.trl import DistillationConfig
from trl_opsd.run.ranges import at_least, at_least_one, in_range

_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "ddp_timeout")
_AT_LEAST_0 = (
    "learning_rate",
    "num_train_epochs",
    "warmup_steps",
    "weight_decay",
    "adam_epsilon",
    "dataloader_num_workers",
    "eval_delay",
)
_AT_LEAST_0_OR_NONE = ("max_grad_norm", "save_total_limit", "max_tool_calling_iterations", "num_completions_to_print")
_EVERY = {"logging_steps": "logging_strategy", "save_steps": "save_strategy", "eval_steps": "eval_strategy"}
"""Intervals, and the option that switches each on with `"steps"`."""


def check_training(args: DistillationConfig) -> None:
    """Checks batches, steps, rates and intervals.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options, before transformers has read them.

    Raises:
        ValueError: An option is out of range.
    """
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
    for name, strategy in _EVERY.items():
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
