"""Refuses unknown names of options and arguments, with the nearest known one; docs/migration.md has those of others."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, ClassVar, Self


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known name that this one may be a slip of, or at most three that have all of its parts.

    Example:

    ```python
    >>> nearest("vllm_host", ["vllm_server_host", "hub_token"]), nearest("eos_token", ["vllm_server_host", "hub_token"])
    (['vllm_server_host'], [])
    ```
    """
    # None where none is near: a wrong hint costs more than no hint.
    known = sorted(known, key=lambda one: (len(one), one))  # often a set, whose order differs from process to process
    longer = [one for one in known if set(name.split("_")) <= set(one.split("_"))]
    slip, similar = (difflib.get_close_matches(name, known, n=1, cutoff=cutoff) for cutoff in (0.9, 0.8))
    return slip or longer[:3] or similar


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest names; empty if there are none."""
    close = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


class StrictNames:
    """A class whose constructor refuses unknown names, each with the nearest known one.

    A subclass that takes `**kwargs` may know more names than its signature tells, so it is left to Python.
    """

    _config_class: ClassVar[Any] = None
    """The config of a class that takes arguments; `None` for a config itself, which takes options."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Checks the names; `__init__` takes the values.

        Raises:
            TypeError: A name is unknown.
        """
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        if unknown := [] if takes_any else [name for name in given if name not in known]:
            told = (cls._explained(name, list(known)[1:]) for name in unknown)
            raise TypeError("\n".join(f"`{cls.__name__}` {one}" for one in told))
        return super().__new__(cls)

    @classmethod
    def _explained(cls, name: str, known: Iterable[str]) -> str:
        """A sentence about an option or an argument that does not exist."""
        config = cls._config_class
        if config is not None and name in {one.name for one in fields(config)}:
            return f"has no argument {name!r}: it is an option, `args={config.__name__}({name}=...)`."
        hint = did_you_mean(name, known) or "docs/migration.md has the names of other trainers, docs/reference.md all."
        return f"has no {'option' if config is None else 'argument'} {name!r}: {hint}"
