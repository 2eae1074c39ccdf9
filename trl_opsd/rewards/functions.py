"""Calls reward functions with the rows of a batch, and checks that each returns one reward per row.

B rows · F functions
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from trl_opsd._compat.trl import is_async_callable

__all__ = ["Rewards"]


@final
class EventLoop:
    """An event loop in a thread of its own; it starts with the first coroutine, and stops with this object.

    It stays between batches, as HTTP clients are bound to one loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for a coroutine and returns its result."""
        if self._loop is None:
            # In its own thread, as the caller's may have a running loop, as in a notebook, where no other can be run.
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_forever, args=(self._loop,), name="rewards", daemon=True).start()
            # The thread does not hold this object, so it can be collected.
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C nothing awaits it
            raise


def _forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """All reward functions of a trainer."""

    functions: Mapping[str, Callable[..., Any]]
    """Reward functions by their names in the log."""
    weights: Tensor
    """[F], `reward_weights`."""
    loop: EventLoop = field(default_factory=EventLoop)
    """Event loop of those that are coroutines."""

    def of(self, arguments: Mapping[str, Any], rows: Sequence[str]) -> Tensor:
        """The rewards of some rows, named for messages: [B, F], float32, NaN where a function returned `None`."""
        if not rows:
            return torch.empty(0, len(self.functions))
        found, coroutines = {}, {}
        for name, function in self.functions.items():
            if is_async_callable(function):
                coroutines[name] = function
                continue
            with _explained(name, rows):
                found[name] = function(**arguments)

        async def one(name: str, function: Callable[..., Any]) -> Any:
            with _explained(name, rows):
                return await function(**arguments)

        async def together() -> list[Any]:
            return await asyncio.gather(*(one(name, function) for name, function in coroutines.items()))

        if coroutines:
            found.update(zip(coroutines, self.loop.run(together()), strict=True))
        return torch.tensor([_checked(found[name], name, rows) for name in self.functions]).T


@contextmanager
def _explained(name: str, rows: Sequence[str]) -> Iterator[None]:
    """Names function and rows in an error of a reward function."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):  # the trainer explains these
        raise
    except Exception as error:
        which = rows[0] if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
        raise RuntimeError(
            f"The reward function {name!r} failed for {which}: {type(error).__name__}: {error}"
        ) from error


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
