"""Notices options that are changed after they were read: by the config, which checks them, a trainer or a training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, Self

from transformers import TrainingArguments

from trl_opsd._compat.transformers import CHECKPOINTING
from trl_opsd._compat.trl import DistillationConfig

_LIVE = {
    "learning_rate",
    "ds3_gather_for_generation",
    "eval_temperature",
    "loss_chunk_tokens",
    "max_tokens_per_microbatch",
    "nonfinite",
    "nonfinite_skip_limit",
    "remove_unused_columns",
    "resume_with_changes",
    "vllm_sync_check",
}
"""Options of ours and TRL's that are read whenever they are needed, so that a change has an effect."""

_READ_ONCE = {
    "bf16",
    "fp16",
    "full_determinism",
    "enable_jit_checkpoint",
    "neftune_noise_alpha",
    "per_device_train_batch_size",
    "report_to",
    "torch_compile",
    "use_cpu",
    "accelerator_config",
    "deepspeed",
    "fsdp",
    "fsdp_config",
}
"""Options of transformers that are read only when a trainer is built, of those on which something depends."""

OF_THE_OPTIMIZER = (
    "learning_rate",
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
"""Options that are read when an optimizer is made."""

_AT_START = {
    "gradient_accumulation_steps",
    CHECKPOINTING,
    "max_steps",
    "num_train_epochs",
    "seed",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    *OF_THE_OPTIMIZER,
}
"""Options of transformers that are read when a training begins, and for the rest of it, or have to stay during it."""

_INSTEAD = {
    "divergence": "assign `trainer.divergence`",
    "beta": "assign `trainer.divergence`",
}
"""What to do instead of changing an option, where a new trainer is not needed."""


def option_values(args: TrainingArguments) -> dict[str, Any]:
    """The options as they are now; dicts and lists are copied, so that a change in them shows."""
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}


_OF_A_PROCESS = (
    "output_dir",
    "report_to",
    "log_completions",
    "vllm_server_host",
    "vllm_server_port",
    "teacher_model_name_or_path",
    "teacher_server_url",
)
"""Options that may differ between processes: what one of them logs, and what is nearer to one of them."""


def shared_options(args: DistillationConfig, ours: type) -> dict[str, Any]:
    """The options that decide how one student is trained, as far as they can be compared between processes.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.
        ours (`type`):
            The config of this package.
    """
    names = {*DistillationConfig.__annotations__, *ours.__annotations__, *_READ_ONCE, *_AT_START} - {*_OF_A_PROCESS}
    plain = (str, int, float, dict, list, type(None))
    return {name: value for name in sorted(names) if isinstance(value := getattr(args, name), plain)}


def check_same_options(each: Sequence[dict[str, Any]]) -> None:
    """Refuses options that differ between processes, whose students would become different ones.

    Args:
        each (`Sequence[dict[str, Any]]`):
            For each process, its options by name.

    Raises:
        ValueError: Two differ; the message names option and process.
    """
    for process, options in enumerate(each):
        for name, value in options.items():
            if value != each[0].get(name):
                raise ValueError(
                    f"`{name}` is {value!r} in process {process} and {each[0].get(name)!r} in process 0, but all "
                    "processes train one student: give all the same. Each draws its own samples with one `seed`."
                )


class ReadOnce:
    """Options that are not read again, with the values they had.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options.
        names (`Collection[str]`):
            Which of them.
        when (`str`):
            When they were read.
        instead (`str`):
            What to do instead of changing one.
    """

    def __init__(self, args: DistillationConfig, names: Collection[str], when: str, instead: str) -> None:
        self._when, self._instead = when, instead
        self._then = {name: value for name, value in option_values(args).items() if name in names}

    @classmethod
    def by_trainer(cls, args: DistillationConfig, ours: type) -> Self:
        """The options that a trainer has read when it was built.

        Args:
            args ([`~trl.DistillationConfig`]):
                The options of the trainer; a class derived from the config may have more, which are the user's.
            ours (`type`):
                The config of this package.
        """
        names = {*DistillationConfig.__annotations__, *ours.__annotations__, *_READ_ONCE} - _LIVE
        return cls(args, names, "the trainer was built", "build the trainer with that value")

    @classmethod
    def by_training(cls, args: DistillationConfig) -> Self:
        """The options that a training has read when it began."""
        return cls(args, _AT_START, "the training began", "change it between two trainings")

    @property
    def names(self) -> set[str]:
        """Names of these options."""
        return set(self._then)

    def check(self, args: DistillationConfig) -> None:
        """Refuses changes, which would have no effect, or break what has begun.

        Raises:
            ValueError: An option has another value than when it was read.
        """
        for name, then in self._then.items():
            now = getattr(args, name)
            if now != then:
                raise ValueError(
                    f"`args.{name}` was {then!r} when {self._when}, where it was read, and is {now!r} now, "
                    f"which has no effect: {_INSTEAD.get(name, self._instead)}, or restore it."
                )
