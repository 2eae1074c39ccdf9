"""Finds what `generate` takes from elsewhere than the options, and rejects what would fail in a run."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from transformers import GenerationConfig

from trl_opsd._compat.peft import CausalLM
from trl_opsd.options.normalize import FAIL_IN_GENERATE, SAMPLING

_CHANGES_NO_TOKEN = (
    *("transformers_version", "bos_token_id", "decoder_start_token_id", "max_length", "cache_implementation"),
    *("return_dict_in_generate", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores"),
    *("output_logits", "use_cache"),
)
"""Settings of a checkpoint's generation config that do not change a rollout."""
logger = get_logger(__name__)


def warn_of_overridden(model: CausalLM, config: GenerationConfig) -> None:
    """Warns which sampling settings of the student's checkpoint the trainer's options override."""
    own = {name: getattr(model.generation_config, name, None) for name in SAMPLING}
    ours = {name: getattr(config, name) for name in own}
    over = [name for name, value in own.items() if None not in (value, ours[name]) and value != ours[name]]
    if over:
        theirs, used = (", ".join(f"{name}={of[name]}" for name in over) for of in (own, ours))
        logger.warning_once(
            f"The student's generation config has {theirs}, but the trainer's options take precedence: {used}. To use "
            "the checkpoint's values, set them in `OPSDConfig`."
        )


def of_model(model: CausalLM, config: GenerationConfig, writer: str) -> dict[str, Any]:
    """What `generate` takes from the model's own config, as `config` lacks it; rejects what would fail in a run."""
    own = model.generation_config.to_diff_dict()
    found = {
        name: value
        for name, value in own.items()
        # `generate` takes the model's value where this config has none.
        if getattr(config, name, None) is None and name not in _CHANGES_NO_TOKEN and not name.startswith("_")
    }
    for name, value in found.items():
        if name in FAIL_IN_GENERATE:
            raise ValueError(
                f"`model.generation_config.{name}` of {writer} is {value!r}: it {FAIL_IN_GENERATE[name]}; set it to "
                "None before the trainer is built."
            )
    return found
