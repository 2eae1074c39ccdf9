"""Keeps one static cache from rollout to rollout, so that its addresses stay the same for compiled steps.

A CUDA graph is recorded for the addresses of a static cache. So one set of buffers, for the largest number of rows so
far, serves every rollout, and a smaller batch uses the first rows of the same buffers.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from trl_opsd._compat.peft import CausalLM


class KeptCaches:
    """Static caches of one student in the same buffers, one for each number of rows.

    The buffers are reallocated, and graphs recorded again, for more rows or a greater length than before. They take the
    memory of one static cache, also between rollouts, until `clear`.
    """

    def __init__(self) -> None:
        self._by_rows: dict[int, Any] = {}
        self._made_for: tuple[Any, ...] = ()
        self._tokens = 0

    def clear(self) -> None:
        """Releases the memory."""
        self._by_rows, self._made_for, self._tokens = {}, (), 0

    def start(self, model: CausalLM, tokens: int, rows: int) -> Any:
        """An empty cache for rows of at most `tokens`, prompt included: a kept one, or a new, not yet allocated one."""
        made_for = (model, model.dtype, model.device)
        kept_tokens = self._tokens if made_for == self._made_for else 0
        if tokens > kept_tokens or rows > max(self._by_rows, default=0):
            self.clear()  # before the new one takes its memory
            # Never shorter than before, or lengths in turn would reallocate each time.
            self._made_for, self._tokens = made_for, max(tokens, kept_tokens)
            return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=self._tokens)
        cache = self._for_rows(rows)
        cache.reset()
        return cache

    def keep(self, cache: Any, rows: int) -> None:
        """Keeps a cache that has been filled for the first time."""
        self._by_rows.setdefault(rows, cache)

    def shrink(self, cache: Any, places: Tensor) -> Any:
        """The cache of fewer rows, filled with the rows of `cache` at `places`."""
        smaller = self._for_rows(len(places))
        for source, target in zip(cache.layers, smaller.layers, strict=True):
            for name, value in vars(source).items():
                setattr(target, name, _copied_rows(value, getattr(target, name), places))
        return smaller

    def _for_rows(self, rows: int) -> Any:
        """The cache on the first `rows` rows of the buffers, made once."""
        if rows not in self._by_rows:
            cache = copy.copy(self._by_rows[max(self._by_rows)])
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            for layer in cache.layers:
                vars(layer).update({name: _first_rows(value, rows) for name, value in vars(layer).items()})
            self._by_rows[rows] = cache
        return self._by_rows[rows]


def with_one_dtype(kept: Any) -> Any:
    """A cache that converts keys to the dtype of the values; it stays the same object.

    Under autocast keys come out of a rotation in float32, and values out of a product in half precision. A static cache
    takes only one dtype; another would take twice the memory, and all of it would be cast again for each token.
    """
    kind: Any = type(kept)
    kept.__class__ = _of_one_dtype(kind)
    return kept


@cache
def _of_one_dtype(kind: Any) -> Any:
    if hasattr(kind, "takes_one_dtype"):
        return kind

    class OfOneDtype(kind):
        takes_one_dtype = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return kind.update(self, key_states.to(value_states.dtype), value_states, *args, **kwargs)

    return OfOneDtype


def _first_rows(value: Any, rows: int) -> Any:
    """The first rows of a tensor, at its address, also of tensors in a container; other values unchanged."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: _first_rows(one, rows) for key, one in pairs}
        return made if isinstance(value, dict) else list(made.values())
    if not _holds_rows(value):
        return value
    # Not a view: autograd would make the compiler track its base.
    first = value.new_empty(0).set_(
        value.untyped_storage(), value.storage_offset(), (rows, *value.shape[1:]), value.stride()
    )
    torch._dynamo.mark_static_address(first)
    return first


def _copied_rows(value: Any, target: Any, places: Tensor) -> Any:
    """`target`, filled with the rows of `value` at `places`; values without rows are returned unchanged."""
    if isinstance(value, dict):
        return {key: _copied_rows(one, target.get(key), places) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied_rows(*pair, places) for pair in zip(value, target, strict=True)]
    if not _holds_rows(value):
        return value
    return target.copy_(value.index_select(0, places.to(value.device)))


def _holds_rows(value: Any) -> bool:
    """Whether a value is keys, values or states, not the count of tokens, which all rows share."""
    return isinstance(value, Tensor) and value.dim() > 1
