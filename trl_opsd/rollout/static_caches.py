"""Keeps the buffers of one static cache from rollout to rollout: a CUDA graph is recorded for their addresses."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import StaticCache

from trl_opsd._compat.peft import CausalLM


class StaticCaches:
    """Static caches of one student, one for each number of rows, on the first rows of the same buffers.

    The buffers are reallocated, and graphs recorded again, for more rows or a greater length than before. They take the
    memory of one static cache, also between rollouts, until `clear`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Releases the memory."""
        self._by_rows: dict[int, Any] = {}
        self._built_for: tuple[Any, ...] = ()
        self._tokens = 0

    def start(self, model: CausalLM, tokens: int, rows: int) -> Any:
        """An empty cache for rows of at most `tokens`, prompt included; a new one is not yet allocated."""
        built_for = (model, model.dtype, model.device)
        kept_tokens = self._tokens if built_for == self._built_for else 0
        if tokens <= kept_tokens and rows <= max(self._by_rows, default=0):
            kept = self._with_rows(rows)
            kept.reset()
            return kept
        self.clear()  # before the new one takes its memory
        # Never shorter than before, or lengths in turn would reallocate each time.
        self._built_for, self._tokens = built_for, max(tokens, kept_tokens)
        return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=self._tokens)

    def keep(self, filled: Any, rows: int) -> None:
        """Keeps a cache that has been allocated by its first use."""
        self._by_rows.setdefault(rows, filled)

    def shrink(self, larger: Any, places: Tensor) -> Any:
        """The cache of fewer rows, filled with the rows of `larger` at `places`."""

        def copied(source: Any, target: Any) -> Any:
            if not _has_rows(source):
                return source
            return target.copy_(source.index_select(0, places.to(source.device)))

        smaller = self._with_rows(len(places))
        for source, target in zip(larger.layers, smaller.layers, strict=True):
            vars(target).update(tree_map(copied, vars(source), vars(target)))
        return smaller

    def _with_rows(self, rows: int) -> Any:
        if rows not in self._by_rows:
            fewer = copy.copy(self._by_rows[max(self._by_rows)])
            fewer.layers = [copy.copy(layer) for layer in fewer.layers]
            for layer in fewer.layers:
                vars(layer).update(tree_map(lambda value: _first_rows(value, rows), vars(layer)))
            self._by_rows[rows] = fewer
        return self._by_rows[rows]


def _first_rows(value: Any, rows: int) -> Any:
    """The first rows of a tensor, at its address; other values unchanged."""
    if not _has_rows(value):
        return value
    # Not a view: autograd would make the compiler track its base.
    first = value.new_empty(0).set_(
        value.untyped_storage(), value.storage_offset(), (rows, *value.shape[1:]), value.stride()
    )
    torch._dynamo.mark_static_address(first)
    return first


def _has_rows(value: Any) -> bool:
    # The count of tokens, which all rows share, has no dimensions.
    return isinstance(value, Tensor) and value.dim() > 1


def with_one_dtype(given: Any) -> None:
    """Makes a cache convert keys to the dtype of the values.

    Under autocast keys come out of a rotation in float32, and values out of a product in half precision. A static cache
    takes only one dtype; another would take twice the memory, and all of it would be cast again for each token.
    """
    kind: Any = type(given)
    given.__class__ = _of_one_dtype(kind)


@cache
def _of_one_dtype(kind: Any) -> Any:
    if hasattr(kind, "takes_one_dtype"):
        return kind

    class OfOneDtype(kind):
        takes_one_dtype = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return kind.update(self, key_states.to(value_states.dtype), value_states, *args, **kwargs)

    return OfOneDtype
