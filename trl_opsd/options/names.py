"""Names that do not exist: the ones they may stand for, and classes that refuse them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable
from typing import Any, Self

_SHORTEST = 3
"""Letters of a part of a name that count as an abbreviation."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names: the one it may be a slip of, or those that begin with it or have all of its parts.

    None where none is near, since a wrong hint costs more than no hint.

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


def _has_parts(known: str, name: str) -> bool:
    """Whether each part of a name begins, or is, a part of a known one."""
    parts = known.split("_")
    return all(
        any(one == part or (len(part) >= _SHORTEST and one.startswith(part)) for one in parts)
        for part in name.split("_")
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest names; empty if there are none."""
    close = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


class StrictNames:
    """A class whose constructor refuses unknown names, each with what to do.

    Python's own error for them, in the constructor that `dataclass` writes, only repeats the name. A subclass that
    takes `**kwargs` may know more names than its signature tells, so it is left to Python.
    """

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Checks the names; `__init__` takes the values.

        Raises:
            TypeError: A name is unknown.
        """
        known = inspect.signature(cls.__init__).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise TypeError("\n".join(f"`{cls.__name__}` {cls.explain(name, list(known)[1:])}" for name in unknown))
        return super().__new__(cls)

    @classmethod
    def explain(cls, name: str, known: Collection[str]) -> str:
        """What to say about an unknown name, after the name of the class."""
        raise NotImplementedError
