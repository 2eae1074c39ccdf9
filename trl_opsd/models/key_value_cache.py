"""How many numbers a model caches while it writes, counted on a model without weights or estimated from its config."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel

from trl_opsd._compat.transformers import CACHE


def cached_per_token(config: PretrainedConfig) -> int:
    """Keys and values of a token in all layers; 0 where the config states no attention heads.

    What a layer leaves out, beyond its window or because another layer has it, counts too.

    Args:
        config ([`~transformers.PretrainedConfig`]):
            Of the model.
    """
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if not isinstance(layers, int):
        return 0
    each = getattr(text, "per_layer_config", None)  # where layers differ, the whole one refuses to say
    return sum(_of_layer(each[layer] if each is not None else text) for layer in range(layers))


def _of_layer(config: PretrainedConfig) -> int:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    heads, pairs, size, width = (one if isinstance(one := getattr(config, name, None), int) else 0 for name in names)
    return 2 * (pairs or heads) * (size or width // heads) if heads else 0


def cached_numbers(model: PreTrainedModel, tokens: int) -> int:
    """Numbers that a row of `tokens` has in the cache, states of fixed size included.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            On the meta device, where nothing is computed.
        tokens (`int`):
            Of the prompt and the completion.
    """
    try:
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"), use_cache=True)
        parts = tree_leaves([vars(layer) for layer in output[CACHE].layers])
        found = sum(one.numel() for one in parts if isinstance(one, Tensor) and one.dim() > 1)
    except Exception:  # of a family that reads values, and keeps its cache elsewhere
        found = 0
    return found or tokens * cached_per_token(model.config)
