"""Finds the names that an unknown one may stand for; silent where none is near, since a wrong hint costs more."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

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
    begin = [one for one in known if one.startswith(name) and len(name) >= _SHORTEST]
    longer = begin or [one for one in known if "_" in name and _has_parts(one, name)]
    return (
        difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        or difflib.get_close_matches(name, longer, n=3, cutoff=0)
        or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    )


def misspelt(name: str, known: Collection[str]) -> str | None:
    """The name that a new attribute was most likely meant to have; `None` for a name of the user's own.

    Args:
        name (`str`):
            The new attribute.
        known (`Collection[str]`):
            Names of attributes that exist. One that continues them is the user's: `rollouts`, `train_dataset_2`.
    """
    candidates = [one for one in known if not one.startswith("_") and not name.startswith(one)]
    close = () if name.startswith("_") else difflib.get_close_matches(name, candidates, n=1, cutoff=0.9)
    return close[0] if close else None


def _has_parts(known: str, name: str) -> bool:
    """Whether each part of a name begins, or is, a part of a known one."""
    parts = known.split("_")
    return all(
        any(one == part or (len(part) >= _SHORTEST and one.startswith(part)) for one in parts)
        for part in name.split("_")
    )
