"""Calls reward functions with the rows of a batch, and checks that each returns one reward per row.

B rows · F functions
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_opsd._compat.trl import is_async_callable
from trl_opsd.rewards.waiting import EventLoop

__all__ = ["Rewards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """All reward functions of a trainer."""

    functions: Mapping[str, Callable[..., Any]]
    """Reward functions by their names in the log."""
    weights: Tensor
    """[F], `reward_weights`."""
    loop: EventLoop
    """Event loop of those that are coroutines."""

    def of(self, given: Mapping[str, Any], rows: Sequence[str]) -> Tensor:
        """The rewards of some rows, named for messages: [B, F], float32, NaN where a function returned `None`."""
        if not rows:
            return torch.empty(0, len(self.functions))
        columns, waiting = {}, {}
        for name, function in self.functions.items():
            if is_async_callable(function):
                waiting[name] = function
            else:
                columns[name] = _called(name, function, given, rows)
        if waiting:
            columns.update(self.loop.run(_all_of(waiting, given, rows)))
        return torch.tensor([_checked(columns[name], name, rows) for name in self.functions]).T


async def _all_of(
    functions: Mapping[str, Callable[..., Any]], given: Mapping[str, Any], rows: Sequence[str]
) -> dict[str, Any]:
    """What asynchronous functions return, which run concurrently."""

    async def one(name: str, function: Callable[..., Any]) -> Any:
        try:
            return await function(**given)
        except Exception as error:
            raise _failed(name, rows, error) from error

    found = await asyncio.gather(*(one(name, function) for name, function in functions.items()))
    return dict(zip(functions, found, strict=True))


def _called(name: str, function: Callable[..., Any], given: Mapping[str, Any], rows: Sequence[str]) -> Any:
    try:
        return function(**given)
    except (torch.OutOfMemoryError, MemoryError):  # the trainer explains these
        raise
    except Exception as error:
        raise _failed(name, rows, error) from error


def _failed(name: str, rows: Sequence[str], error: Exception) -> RuntimeError:
    which = rows[0] if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
    return RuntimeError(f"The reward function {name!r} failed for {which}: {type(error).__name__}: {error}")


def _checked(returned: Any, name: str, rows: Sequence[str]) -> list[float]:
    """The rewards of one function as numbers."""
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__iter__"):
        raise TypeError(
            f"The reward function {name!r} returned a {type(returned).__name__}: expected a list with one number, or "
            "`None`, for each completion."
        )
    values = list(returned)
    if len(values) != len(rows):
        raise ValueError(
            f"The reward function {name!r} returned {len(values)} rewards for {len(rows)} completions: expected one "
            "for each, `None` where it does not apply."
        )
    return [_number(value, name, row) for value, row in zip(values, rows, strict=True)]


def _number(value: Any, name: str, row: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(
            f"The reward function {name!r} returned {value!r}, a {type(value).__name__}, for {row}: expected a number, "
            "or `None` where it does not apply."
        )
    if math.isinf(value):
        raise ValueError(f"The reward function {name!r} returned {value} for {row}: expected a finite number.")
    return float(value)
