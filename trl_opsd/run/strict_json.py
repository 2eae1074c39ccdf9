"""Reads JSON that somebody else may have written: whatever is wrong with it is one kind of error."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def loads(text: str | bytes) -> Any:
    """As `json.loads`, for text that may be damaged or hostile.

    Args:
        text (`str` or `bytes`):
            UTF-8 if bytes.

    Raises:
        ValueError: It is no JSON, holds NaN or an infinity, which JSON has not, gives a name twice, or is nested deeper
            than Python can follow; the message says which.
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once_each)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in named if names.count(name) > 1)
        raise ValueError(f"it gives {twice[:80]!r} twice")
    return named
