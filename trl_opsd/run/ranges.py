"""Refuses option values that are out of range; messages give the value, what was expected, and the closest match."""

from __future__ import annotations

import difflib
import math
from typing import Any


def one_of(option: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raises `ValueError` unless the value is one of the allowed ones."""
    if value not in allowed:
        close = difflib.get_close_matches(str(value), [str(name) for name in allowed], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"`{option}={value!r}`: expected one of {', '.join(map(repr, allowed))}.{hint}")


def at_least_one(option: str, value: Any) -> None:
    """Raises `ValueError` unless the value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{option}={value!r}`: expected an integer of at least 1.")


def at_least(option: str, value: Any, bound: float) -> None:
    """Raises `ValueError` unless the value is a finite number of at least the bound."""
    if not (_is_number(value) and math.isfinite(value) and value >= bound):
        raise ValueError(f"`{option}={value!r}`: expected a finite number of at least {bound:g}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def above(option: str, value: Any, bound: float) -> None:
    """Raises `ValueError` unless the value is a finite number above the bound."""
    if not (_is_number(value) and math.isfinite(value) and value > bound):
        raise ValueError(f"`{option}={value!r}`: expected a finite number above {bound:g}.")


def between(option: str, value: Any, low: float, high: float) -> None:
    """Raises `ValueError` unless the value is a number between `low` and `high`, and neither of them."""
    if not (_is_number(value) and low < value < high):
        raise ValueError(f"`{option}={value!r}`: expected a number in ({low:g}, {high:g}).")


def in_range(option: str, value: Any, low: float, high: float, open_below: bool = False) -> None:
    """Raises `ValueError` unless the value is a number from `low` to `high`, without `low` itself if `open_below`."""
    if not _is_number(value) or value < low or value > high or (open_below and value == low):
        raise ValueError(f"`{option}={value!r}`: expected a number in {'(' if open_below else '['}{low:g}, {high:g}].")
