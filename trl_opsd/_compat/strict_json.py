"""Parses untrusted JSON; anything wrong with it is a `ValueError`."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def loads(text: str | bytes | bytearray) -> Any:
    """As `json.loads`; NaN, infinities, duplicate keys and nesting too deep for Python are a `ValueError` as well."""
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it contains {name}, which is not valid JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in named if names.count(name) > 1)
        raise ValueError(f"it contains the key {twice[:80]!r} twice")
    return named
