"""Parses untrusted JSON; anything wrong with it is a `ValueError`."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def loads(text: str | bytes | bytearray) -> Any:
    """As `json.loads`, for text that may be damaged or hostile.

    Args:
        text (`str`, `bytes` or `bytearray`):
            UTF-8 if bytes.

    Raises:
        ValueError: It is not JSON, contains NaN or an infinity, has a duplicate key, or is nested too deeply for Python
            to parse; the message says which.
    """
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
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return named
