"""Keeps one static cache from rollout to rollout, so that a compiled step finds its keys where they were before.

A CUDA graph is recorded for the addresses of a static cache. So one set of buffers, for the most rows there have been,
serves every rollout, and a batch that rows have left works in the first places of the same buffers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from trl_opsd._compat.peft import CausalLM


class KeptCaches:
    """Static caches of one student in the same buffers, one for each number of rows.

    The buffers are made anew, and graphs recorded again, for more rows or a greater length than ever before. They take
    the memory of one static cache, between rollouts too, until `clear`.
    """

    def __init__(self) -> None:
        self._by_rows: dict[int, Any] = {}
        self._made_for: tuple[Any, ...] = ()
        self._tokens = 0

    def clear(self) -> None:
        """Gives the memory back."""
        self._by_rows, self._made_for, self._tokens = {}, (), 0

    def start(self, model: CausalLM, tokens: int, rows: int) -> Any:
        """An empty cache to fill: a kept one, or one without memory yet.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                Whose keys it holds.
            tokens (`int`):
                Tokens of the longest row, prompt included.
            rows (`int`):
                Rows of the batch.
        """
        made_for = (model, model.dtype, model.device)
        kept_tokens = self._tokens if made_for == self._made_for else 0
        if tokens > kept_tokens or rows > max(self._by_rows, default=0):
            self.clear()  # before the new one takes its memory
            self._made_for, self._tokens = made_for, max(tokens, kept_tokens)
            return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=self._tokens)
        cache = self._first(rows)
        cache.reset()
        return cache

    def keep(self, cache: Any, rows: int) -> None:
        """Keeps a cache that has been filled for the first time."""
        self._by_rows.setdefault(rows, cache)

    def shrink(self, cache: Any, places: Tensor) -> Any:
        """The cache of fewer rows, with what `cache` holds at `places`."""
        smaller = self._first(len(places))
        for source, target in zip(cache.layers, smaller.layers, strict=True):
            for name, value in vars(source).items():
                setattr(target, name, _moved(value, getattr(target, name), places))
        return smaller

    def _first(self, rows: int) -> Any:
        """The cache of the first rows of the buffers, made once."""
        if rows not in self._by_rows:
            cache = copy.copy(self._by_rows[max(self._by_rows)])
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            for layer in cache.layers:
                vars(layer).update({name: _first(value, rows) for name, value in vars(layer).items()})
            self._by_rows[rows] = cache
        return self._by_rows[rows]


def _first(value: Any, rows: int) -> Any:
    """The first rows of a tensor, at its address, and of those in a container; the rest as it is."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: _first(one, rows) for key, one in pairs}
        return made if isinstance(value, dict) else list(made.values())
    if not _holds_rows(value):
        return value
    # No view: autograd would have the compiler look at what it is a view of.
    first = value.new_empty(0).set_(
        value.untyped_storage(), value.storage_offset(), (rows, *value.shape[1:]), value.stride()
    )
    torch._dynamo.mark_static_address(first)
    return first


def _moved(value: Any, target: Any, places: Tensor) -> Any:
    """`target` with the rows of `value` at `places`; what is no tensor is taken over."""
    if isinstance(value, dict):
        return {key: _moved(one, target.get(key), places) for key, one in value.items()}
    if isinstance(value, list):
        return [_moved(*pair, places) for pair in zip(value, target, strict=True)]
    if not _holds_rows(value):
        return value
    return target.copy_(value.index_select(0, places.to(value.device)))


def _holds_rows(value: Any) -> bool:
    """Whether it is keys, values or states, and not the count of tokens, which all rows share."""
    return isinstance(value, Tensor) and value.dim() > 1
