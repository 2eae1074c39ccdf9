"""Builds a model from its config alone, without its weights, of the class that a training loads."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


def without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model as its config initialises it, on the default device.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Of a checkpoint. Its first architecture names the class, as where TRL loads one: of a multimodal checkpoint
            the whole model. Without a name, the causal language model of its kind.
        dtype (`torch.dtype`):
            Of the weights.

    Raises:
        ValueError: Its kind has no causal language model.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if named is None:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    model: PreTrainedModel = named(config)
    return model.to(dtype)
