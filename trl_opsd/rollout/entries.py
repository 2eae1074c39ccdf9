"""Reads one entry of a server's answer; its error quotes what was received and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trl_opsd.errors import ServerError


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads entries of the answers of one kind of server."""

    server: str
    """The server, as error messages begin."""
    expected: Mapping[str, str]
    """What an entry must be, in words, by its name; by default its type."""

    def __call__(
        self, found: dict[str, Any], name: str, kind: type, is_valid: Callable[[Any], bool] = lambda value: True
    ) -> Any:
        """One entry of an answer, of a given type and accepted by `is_valid`; anything else is a `ServerError`."""
        value = found.get(name)
        is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        fits = is_finite(value) if kind is float else is_kind
        if not (fits and is_valid(value)):
            expected = self.expected.get(name, f"of type {kind.__name__}")
            raise ServerError(f"{self.server} answered {name}={shown(value)}: expected {expected}.")
        return value


def is_count(value: Any) -> bool:
    """Whether a number is positive and below 2**31."""
    return bool(0 < value < 2**31)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def are_ids(values: list[Any]) -> bool:
    """Whether all values can be token ids."""
    return all(type(value) is int and 0 <= value < 2**31 for value in values)


def shown(value: Any) -> str:
    """A value for a message, cut if long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
