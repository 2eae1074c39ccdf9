"""Finds what `generate` takes from elsewhere than the options, and rejects what would fail in a run."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from trl_opsd._compat.peft import CausalLM
from trl_opsd.options.normalize import FAIL_IN_GENERATE
from trl_opsd.options.rules import refuse

_CHANGES_NO_TOKEN = (
    *("transformers_version", "bos_token_id", "decoder_start_token_id", "max_length", "cache_implementation"),
    *("return_dict_in_generate", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores"),
    *("output_logits", "use_cache"),
)
"""Settings of a checkpoint's generation config that do not change a rollout."""


def of_model(model: CausalLM, config: GenerationConfig, writer: str) -> dict[str, Any]:
    """What `generate` takes from the model's own config, as `config` lacks it; rejects what would fail in a run."""
    own = model.generation_config.to_diff_dict()
    found = {
        name: value
        for name, value in own.items()
        # `generate` takes the model's value where this config has none.
        if getattr(config, name, None) is None and name not in _CHANGES_NO_TOKEN and not name.startswith("_")
    }
    for name in FAIL_IN_GENERATE.keys() & found.keys():
        what = f"`model.generation_config.{name}` of {writer} is {found[name]!r}"
        refuse([(True, what, f"it {FAIL_IN_GENERATE[name]}; set it to None before the trainer is built")])
    return found
