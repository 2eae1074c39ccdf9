"""Tiny vision-language models, built by `AutoModelForImageTextToText` and given text only."""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = (
    "gemma3",
    "gemma4",
    "idefics3",
    "internvl",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_vl",
)

PLACEHOLDER = 258
"""The token that stands for an image, in every family."""

_TEXT = {
    "vocab_size": tiny.VOCABULARY,
    "vocab_size_per_layer_input": tiny.VOCABULARY,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 256,
    "sliding_window": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 1,
    "num_hidden_layers": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "patch_size": 14,
    "image_size": 28,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_ROTARY_OF_THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_FIELDS: dict[str, dict[str, Any]] = {
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2_vl": {"rope_parameters": _ROTARY_OF_THREE_AXES},
    "qwen2_5_vl": {"rope_parameters": _ROTARY_OF_THREE_AXES},
    "qwen3_vl": {"rope_parameters": _ROTARY_OF_THREE_AXES},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}
"""Further fields of a family's text config."""


def model(family: str, width: int, seed: int, **text: Any) -> nn.Module:
    """A random model of a family in float32, whose predictions are far from uniform.

    `text` overrides fields of its text config.
    """
    torch.manual_seed(seed)
    made = AutoModelForImageTextToText.from_config(_config(family, width, text), dtype=torch.float32)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(12)
    return made


def _config(family: str, width: int, changed: dict[str, Any]) -> Any:
    kind = CONFIG_MAPPING[family]
    vision = kind.sub_configs["vision_config"]
    vision = type(kind(vision_config={}).vision_config) if vision.__name__ == "AutoConfig" else vision
    text = type(kind().text_config)
    fields = {
        **_known(_TEXT, text()),
        "hidden_size": width,
        "num_attention_heads": width // 16,
        **_FIELDS.get(family, {}),
        **changed,
    }
    sight = _known(_VISION, vision())
    if "out_hidden_size" in vision().to_dict():
        sight["out_hidden_size"] = width
    if "model_type" in vision().to_dict():
        sight["model_type"] = vision.model_type
    name = "image_token_id" if "image_token_id" in kind().to_dict() else "image_token_index"
    return kind(text_config={**fields, "model_type": text.model_type}, vision_config=sight, **{name: PLACEHOLDER})


def _known(values: dict[str, Any], config: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in config.to_dict()}
