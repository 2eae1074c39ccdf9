"""Converts what a rollout returned to lists of integers, from any library; knows neither limits nor vocabulary."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any


def rows_of(returned: Any, prompts: int, backend: str) -> list[list[int]]:
    """One completion for each prompt; `backend` names who returned them, for messages."""
    if not isinstance(returned, list | tuple):
        raise ValueError(
            f"{backend} returned {described(returned)}: `complete` must return a list with one completion for each "
            "prompt, without padding."
        )
    if len(returned) != prompts:
        raise ValueError(
            f"{backend} returned {len(returned)} completions for {prompts} prompts: `complete` must return one for "
            "each, in order."
        )
    return [row_of(row, f"{backend} returned for prompt {number}") for number, row in enumerate(returned)]


def row_of(row: Any, where: str) -> list[int]:
    """One completion; anything else is a `ValueError` that begins with `where`."""
    if hasattr(row, "tolist") and getattr(row, "ndim", None) == 1:  # of torch or numpy
        row = row.tolist()
    if not isinstance(row, list | tuple):
        raise ValueError(f"{where} {described(row)}: expected a list of token ids.")
    return [token if type(token) is int else whole(token, where) for token in row]


def whole(
    token: Any, where: str, role: str = "among the tokens", expected: str = "token ids, which are integers"
) -> int:
    """An integer, also a scalar of numpy or torch, as `int`; anything else is a `ValueError` with what was expected."""
    # `index(True)` is 1, but a mask is not a completion.
    of_bools = isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))
    if not of_bools and getattr(token, "ndim", 0) == 0:
        with suppress(TypeError):
            return index(token)
    raise ValueError(f"{where} {described(token)} {role}: expected {expected}.")


def described(value: Any) -> str:
    """The type of a value, with its shape, or the value if short."""
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    shown = f" ({value!r})" if isinstance(value, bool | int | float | str) and len(repr(value)) <= 40 else ""
    return "None" if value is None else f"a {type(value).__name__}{shape}{shown}"
