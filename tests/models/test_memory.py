"""What the cache of a token is estimated to take."""

from __future__ import annotations

import pytest
from support import vision_language

from trl_opsd.models.weights import cached_per_token


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_the_cache_of_a_model_whose_layers_differ_is_estimated(family):
    config = vision_language.model(family, 32, 0).config
    text = config.get_text_config()
    each = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    heads = [getattr(one, "num_key_value_heads", None) or one.num_attention_heads for one in each]
    assert cached_per_token(config) == sum(2 * n * one.head_dim for n, one in zip(heads, each, strict=True)) > 0
