"""Notices options that are changed after they were read: by the config, which checks them, or by a trainer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from trl_opsd._compat.trl import DistillationConfig

_LIVE = {
    "learning_rate",
    "ds3_gather_for_generation",
    "loss_chunk_tokens",
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

_INSTEAD = {
    "divergence": "assign `trainer.divergence`",
    "beta": "assign `trainer.divergence`",
}
"""What to do instead of changing an option, where a new trainer is not needed."""


def option_values(args: TrainingArguments) -> dict[str, Any]:
    """The options as they are now; dicts and lists are copied, so that a change in them shows."""
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    return {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}


class ReadOnce:
    """The options that a trainer has read when it was built, and does not read again.

    Args:
        args ([`~trl.DistillationConfig`]):
            The options of the trainer; a class derived from the config may have more, which are the user's.
        ours (`type`):
            The config of this package.
    """

    def __init__(self, args: DistillationConfig, ours: type) -> None:
        names = {*DistillationConfig.__annotations__, *ours.__annotations__, *_READ_ONCE} - _LIVE
        self._then = {name: value for name, value in option_values(args).items() if name in names}

    @property
    def names(self) -> set[str]:
        """Names of these options."""
        return set(self._then)

    def check(self, args: DistillationConfig) -> None:
        """Refuses changes, which would have no effect.

        Raises:
            ValueError: An option has another value than when the trainer was built.
        """
        for name, then in self._then.items():
            now = getattr(args, name)
            if now != then:
                raise ValueError(
                    f"`args.{name}` was {then!r} when the trainer was built, where it was read, and is {now!r} now, "
                    f"which has no effect: {_INSTEAD.get(name, 'build the trainer with that value')}, or restore it."
                )
