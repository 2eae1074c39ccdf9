"""Keeps torch's modes of a generator, gradients and autocast, apart from those of the code that takes its items."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def with_own_modes(items: Generator[T, Any, Any], device_type: str) -> Iterator[T]:
    """The items of a generator that may yield inside of `torch.no_grad` or `torch.autocast`."""
    modes: list[Any] | None = None

    @contextmanager
    def inside() -> Iterator[None]:
        nonlocal modes
        outside = _modes(device_type)
        _set(device_type, *(modes or outside))
        try:
            yield
        finally:
            modes = _modes(device_type)
            _set(device_type, *outside)

    try:
        while True:
            try:
                with inside():
                    item = next(items)
            except StopIteration:
                return
            yield item
    finally:
        with inside():
            items.close()


def _modes(device_type: str) -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    ]


def _set(device_type: str, gradients: bool, autocast: bool, dtype: torch.dtype, cache: bool) -> None:
    torch.set_grad_enabled(gradients)
    torch.set_autocast_enabled(device_type, autocast)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(cache)
