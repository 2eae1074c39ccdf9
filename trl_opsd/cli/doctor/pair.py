"""Loads the two models and tokenizers of a training, whole or with two small layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

LAYERS = 2
"""Layers of a tiny model."""
_NARROW = {"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4}
"""The largest values that a tiny model has: sizes that neither its head nor its attention depends on."""


@dataclass(frozen=True, slots=True)
class Side:
    """A model with its tokenizer."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Pair:
    """What is examined."""

    student: Side
    teacher: Side
    tiny: bool = False

    @property
    def device(self) -> torch.device:
        """Where both models are."""
        return self.student.model.device


def load_pair(student: str, teacher: str, tiny: bool = False) -> Pair:
    """Loads both models in float32, onto the accelerator if there is one.

    Args:
        student (`str`), teacher (`str`):
            Folders or ids of the Hub.
        tiny (`bool`, *optional*, defaults to `False`):
            Build random models of two layers from the configs; vocabulary, hidden size and head stay as they are.

    Raises:
        OSError: There is no model.
        ValueError: It is no causal language model, or has no tokenizer.
    """
    logging.disable_progress_bar()
    return Pair(_load(student, tiny, seed=0), _load(teacher, tiny, seed=1), tiny)


def _load(source: str, tiny: bool, seed: int) -> Side:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if tiny:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(shrunk(AutoConfig.from_pretrained(source)), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return Side(source, model.to(device).eval(), AutoTokenizer.from_pretrained(source))


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A config with two layers and narrow feed-forward parts, in place.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Of any causal language model; of a multimodal one, the text part is changed.
    """
    text: Any = config.get_text_config()
    for name, most in _NARROW.items():
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, min(value, most))
    for name in ("num_experts_per_tok", "num_experts_per_token"):
        if isinstance(value := getattr(text, name, None), int):
            setattr(text, name, min(value, 2))
    if isinstance(kinds := getattr(text, "layer_types", None), list):
        text.layer_types = kinds[:LAYERS] if len(set(kinds)) == 1 else _one_of_each(kinds)
    text.num_hidden_layers = LAYERS
    return config


def _one_of_each(kinds: list[str]) -> list[str]:
    """Two layers of different kinds, in the order in which they first occur."""
    return list(dict.fromkeys(kinds))[:LAYERS]
