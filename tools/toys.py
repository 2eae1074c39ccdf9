"""Builds any causal language model of the installed transformers at toy size, from the names of its config's fields."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM_NAMES

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim", "lru_width"), 32
    ),
    **dict.fromkeys(
        ("input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "backbone_hidden_size"), 32
    ),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "n_inner", "d_inner"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size", "dense_intermediate_size", "feed_forward_size"), 32),
    **dict.fromkeys(("dff", "dim_ff", "intermediate_size_mlp", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "swa_num_attention_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("head_dim", "swa_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_head"), 16),
    **dict.fromkeys(("kv_channels", "attention_head_size", "attention_head_dim", "index_head_dim", "dim_head"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_headdim", "linear_head_dim", "state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "moe_latent_size"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "topk_group", "n_group"), 2),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "num_expert_group", "o_groups"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 256),
    **dict.fromkeys(("vocab_size_per_layer_input", "decoder_vocab_size"), None),
    **dict.fromkeys(("hidden_size_per_layer_input", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("pad_token_id", "eod_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 8,
    "sliding_window": 64,
    "is_decoder": True,
}
"""Values of config fields by name; `None` stands for the vocabulary size."""

QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
"""Sparse attention over blocks of four tokens."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 4},
    "mimo_v2_flash": {"head_dim": 24, "swa_head_dim": 24},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16]},
    "qwen4_exp": {"text_config": QSA},
    "qwen4_exp_text": QSA,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that a family needs for a consistent config at this size."""


def families() -> list[str]:
    """The model types for which the installed transformers has a causal language model."""
    return sorted(CAUSAL_LM_NAMES)


def toy(family: str, vocabulary: int, seed: int = 0, sharpness: float = 1.0, **overrides: Any) -> PreTrainedModel:
    """A random model of a family, in float32, without dropout or noise.

    Args:
        family (`str`):
            Its model type.
        vocabulary (`int`):
            Rows of its head.
        seed (`int`, *optional*, defaults to 0):
            Seed of its weights.
        sharpness (`float`, *optional*, defaults to 1.0):
            Multiplies the weight of its head, so that predictions are far from uniform.
        **overrides (`Any`):
            Fields of its config.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, vocabulary, **overrides), dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.normal_(module.weight.data[module.padding_idx], std=0.02)  # zero in an untrained model only
    with torch.no_grad():
        if (head := model.get_output_embeddings()) is not None:
            head.weight.mul_(sharpness)
    return model


def config_of(family: str, vocabulary: int, **overrides: Any) -> PretrainedConfig:
    """The config of a family at toy size."""
    kind = CONFIG_MAPPING[family]
    return kind(**{**_small(kind(), vocabulary), **OVERRIDES.get(family, {}), **overrides})


def _small(config: PretrainedConfig, vocabulary: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if name in config.sub_configs and value is not None:
            found[name] = _small(getattr(config, name), vocabulary)
        elif name == "vocab_size" or (name in SIZES and SIZES[name] is None):
            found[name] = vocabulary
        elif name in SIZES and not isinstance(value, list):
            found[name] = SIZES[name]
        elif ("drop" in name or "noise" in name) and isinstance(value, float):
            found[name] = 0.0
    return found
