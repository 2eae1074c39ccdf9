"""Size of a model's key-value cache, measured on a model without weights or estimated from its config."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from trl_opsd._compat.versions import CACHE


def cached_per_token(config: PretrainedConfig) -> int:
    """Numbers (keys and values) per token over all layers, as an upper bound; 0 where the config states no heads."""
    # Windows and layers that share another's cache are not subtracted.
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if not isinstance(layers, int):
        return 0
    each = getattr(text, "per_layer_config", None)  # where layers differ, the whole config has no value
    return sum(_of_layer(each[layer] if each is not None else text) for layer in range(layers))


def _of_layer(config: PretrainedConfig) -> int:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    heads, pairs, size, width = (one if isinstance(one := getattr(config, name, None), int) else 0 for name in names)
    return 2 * (pairs or heads) * (size or width // heads) if heads else 0


def cached_numbers(model: PreTrainedModel, tokens: int) -> int:
    """Numbers that a row of so many tokens caches, recurrent states included; `model` is on the meta device."""
    try:
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"), use_cache=True)
        parts = tree_leaves([vars(layer) for layer in output[CACHE].layers])
        found = sum(one.numel() for one in parts if isinstance(one, Tensor) and one.dim() > 1)
    except Exception:  # a family that reads tensor values, which meta tensors lack, or keeps its cache elsewhere
        found = 0
    return found or tokens * cached_per_token(model.config)
