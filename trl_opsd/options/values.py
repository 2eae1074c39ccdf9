"""Which values an option may have, and how that is said: the value, what was expected, and the closest name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Values:
    """The values that fit; `above(0) | None` may be `None` as well."""

    expected: str
    """In words, after "expected"."""
    fits: Callable[[Any], bool]
    names: tuple[Any, ...] = ()
    """All of them, where they are few."""

    def __or__(self, other: None) -> Values:
        return replace(self, fits=lambda value: value is None or self.fits(value))

    def check(self, option: str, value: Any) -> None:
        """Raises `ValueError` if the value of an option does not fit."""
        if not self.fits(value):
            close = difflib.get_close_matches(str(value), [str(name) for name in self.names], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"`{option}={value!r}`: expected {self.expected}.{hint}")


def is_number(value: Any) -> bool:
    """Whether a value is a number that counts something: neither a boolean nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def one_of(*names: Any) -> Values:
    """One of a few values."""
    return Values(f"one of {', '.join(map(repr, names))}", lambda value: value in names, names)


def at_least(bound: float) -> Values:
    """A finite number."""
    return Values(
        f"a finite number of at least {bound:g}", lambda value: is_number(value) and bound <= value < math.inf
    )


def above(bound: float) -> Values:
    """A finite number."""
    return Values(f"a finite number above {bound:g}", lambda value: is_number(value) and bound < value < math.inf)


def between(low: float, high: float) -> Values:
    """A number that is neither end."""
    return Values(f"a number in ({low:g}, {high:g})", lambda value: is_number(value) and low < value < high)


def from_to(low: float, high: float) -> Values:
    """A number, both ends included."""
    return Values(f"a number in [{low:g}, {high:g}]", lambda value: is_number(value) and low <= value <= high)


def share() -> Values:
    """A number above 0 and up to 1."""
    return Values("a number in (0, 1]", lambda value: is_number(value) and 0 < value <= 1)


def integer(low: int, expected: str = "", high: float = math.inf) -> Values:
    """An integer of at least `low`."""

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return Values(expected or f"an integer of at least {low}", fits)
