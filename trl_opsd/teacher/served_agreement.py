"""Compares the servers' answers across processes, which may reach different servers under the same address.

L tokens of the first row · H hidden width
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor, distributed

from trl_opsd.teacher.answered_states import WrongStatesError, are_same, distance


class Reached(NamedTuple):
    """What a process found at its servers."""

    urls: tuple[str, ...]
    states: Tensor
    """[L, H], float32, of the row that all processes sent."""
    dtype: torch.dtype
    """The dtype they were computed in."""
    context: int | None
    """Maximum tokens of a row including its last, which is not sent; `None` where there is no limit."""


def reached_by_all(own: Reached) -> list[Reached]:
    """What each process found, by rank; raises `WrongStatesError` in all if two teachers differ. Collective."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [own]
    found: list[Reached] = [Reached(*one) for one in gather_object([tuple(own)])]
    _check(found)
    return found


def _check(found: Sequence[Reached]) -> None:
    first = found[0]
    for process, one in enumerate(found):
        if one.states.shape == first.states.shape and one.dtype == first.dtype and are_same(one.states, first.states):
            continue
        apart = f"{distance(one.states, first.states):.2g} times their length apart, "
        raise WrongStatesError(
            f"The teacher's servers of process 0 ({', '.join(first.urls)}) and of process {process} "
            f"({', '.join(one.urls)}) return different states for the same tokens, "
            f"{apart if one.states.shape == first.states.shape else ''}in {_word(first.dtype)} and {_word(one.dtype)}: "
            "start all with one checkpoint, revision and `--dtype`; 127.0.0.1 is another server on each machine."
        )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
