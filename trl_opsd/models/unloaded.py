"""Builds a model from its config alone, without weights, of the class that a training loads."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


def without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model as its config initialises it, on the default device."""
    # The class that TRL loads: the first architecture, which of a multimodal checkpoint is the whole model; without a
    # name, the causal language model of the config's kind.
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    model: PreTrainedModel = named(config)
    return model.to(dtype)
