"""Finds the names that an unknown one may stand for; silent where none is near, since a wrong hint costs more."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHORTEST = 3
"""Letters of a part of a name that count as an abbreviation."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names: the one it may be a slip of, or those that begin with it or have all of its parts.

    Args:
        name (`str`):
            The unknown name, its parts joined by underscores.
        known (`Iterable[str]`):
            The names that exist.

    Example:

    ```python
    >>> nearest("vllm_host", ["vllm_server_host", "hub_token"]), nearest("eos_token", ["vllm_server_host", "hub_token"])
    (['vllm_server_host'], [])
    ```
    """
    known = list(known)
    begin = [one for one in known if one.startswith(name)]
    longer = begin or [one for one in known if "_" in name and _has_parts(one, name)]
    return (
        difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        or difflib.get_close_matches(name, longer, n=3, cutoff=0)
        or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    )


def _has_parts(known: str, name: str) -> bool:
    """Whether each part of a name begins, or is, a part of a known one."""
    parts = known.split("_")
    return all(
        any(one == part or (len(part) >= _SHORTEST and one.startswith(part)) for one in parts)
        for part in name.split("_")
    )
