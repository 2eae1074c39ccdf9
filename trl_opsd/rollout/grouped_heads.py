"""Decodes a token under a mask without repeating keys for the query heads that share them.

B rows · Q query heads · K key heads, each of G = Q / K query heads · L cached tokens · D head size
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_SDPA = "sdpa"


@contextmanager
def keys_read_once() -> Iterator[None]:
    """In the body, SDPA reads each key once in a decode step, where `transformers` copies the cache G times.

    It does so wherever there is a mask: for prompts of unequal length, and with a static cache.
    """
    if ALL_ATTENTION_FUNCTIONS[_SDPA] is not sdpa_attention_forward:  # a user's own
        yield
        return
    ALL_ATTENTION_FUNCTIONS[_SDPA] = attended
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[_SDPA]  # what is registered from now on counts


def attended(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """[B, 1, Q, D]: attention as that of `transformers`, in one call for a token under a mask."""
    (rows, heads, tokens, _), groups = query.shape, getattr(module, "num_key_value_groups", 1)
    if attention_mask is None or tokens > 1 or groups == 1 or attention_mask.size(1) > 1 or "position_bias" in more:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    # With one token there is no order among queries, so the G heads of a key can be its queries.
    query_BKGD = query.view(rows, heads // groups, groups, -1)
    out_BKGD = functional.scaled_dot_product_attention(
        query_BKGD,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=more.get("dropout", 0.0),
        scale=more.get("scaling"),
    )
    return out_BKGD.reshape(rows, 1, heads, -1), None
