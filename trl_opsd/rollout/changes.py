"""Finds what was assigned to `trainer.generation_config` after construction, and refuses what cannot be followed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

IN_GENERATE: Mapping[str, str] = {
    "eos_token_id": "set `model.generation_config.eos_token_id` before the trainer is built",
    "pad_token_id": "set `tokenizer.pad_token` before the trainer is built",
    "num_return_sequences": "a rollout is one completion for each prompt",
    "return_dict_in_generate": "a rollout is token ids",
}
"""What `generate` cannot follow here, and why or what to do."""


def assigned(config: GenerationConfig, bound: GenerationConfig) -> dict[str, Any]:
    """The values that differ from those at the time of binding, by their names."""
    before = bound.to_dict()
    return {name: value for name, value in config.to_dict().items() if value != before.get(name)}


def check_followed(changes: Mapping[str, Any], unable: Mapping[str, str]) -> None:
    """Refuses changes that a rollout would ignore, or could not survive.

    Args:
        changes (`Mapping[str, Any]`):
            As [`assigned`] finds them.
        unable (`Mapping[str, str]`):
            What cannot be followed, with what to do.

    Raises:
        ValueError: One of them was changed.
    """
    for name, value in changes.items():
        if name in unable:
            raise ValueError(f"`trainer.generation_config.{name} = {value!r}` cannot be followed: {unable[name]}.")
