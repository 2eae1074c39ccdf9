"""The seam every engine stands behind: token ids in, token ids out; it knows neither templates nor padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from operator import index
from typing import Any

from trl_opsd.host import Host


class RolloutBackend(ABC):
    """Lets the current student write one completion for each prompt."""

    @abstractmethod
    def bind(self, trainer: Host) -> None:
        """Called once, when the trainer is complete and before anything is generated.

        Args:
            trainer ([`~host.Host`]):
                The trainer: gives the student, the accelerator and the options.
        """

    @abstractmethod
    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        """Writes completions. Every process calls this at the same time, each with prompts of its own.

        Args:
            prompt_ids (`list[list[int]]`):
                The prompts, not padded, each with at least one token.
            step (`int`):
                Optimizer steps done so far; the student's weights do not change within a step.

        Returns:
            `list[list[int]]`: one completion for each prompt, in order, without the prompt and without padding. A
            completion may also be a tuple, or a tensor or array of whole numbers with one dimension. What follows the
            first end-of-sequence token is cut off by the caller; an empty completion is not trained on.
        """

    def close(self) -> None:  # noqa: B027 (most backends have nothing to say here)
        """Gives back what it holds besides the student, after which it writes no more. Most hold nothing."""


def cut_after_end(completion_ids: list[int], end_ids: Collection[int]) -> list[int]:
    """Keeps a completion up to and including its first end-of-sequence token, whichever of them that is."""
    for position, token in enumerate(completion_ids):
        if token in end_ids:
            return completion_ids[: position + 1]
    return completion_ids


def token_ids(returned: Any, prompts: int, backend: str) -> list[list[int]]:
    """What a rollout returned, as lists of whole numbers; whether a model knows them is not looked at.

    Args:
        returned (`Any`):
            Should be one completion for each prompt, each a list, a tuple, or a tensor or array with one dimension.
        prompts (`int`):
            How many there were.
        backend (`str`):
            Who returned it, for the message.

    Raises:
        ValueError: It is something else; the message says what and in which row.
    """
    if not isinstance(returned, list | tuple):
        raise ValueError(
            f"{backend} returned {_described(returned)}: `complete` must return a list with one completion for each "
            "prompt, without padding."
        )
    if len(returned) != prompts:
        raise ValueError(
            f"{backend} returned {len(returned)} completions for {prompts} prompts: `complete` must return one for "
            "each, in order."
        )
    return [_row(row, f"{backend} returned for prompt {number}") for number, row in enumerate(returned)]


def _row(row: Any, where: str) -> list[int]:
    if hasattr(row, "tolist") and getattr(row, "ndim", None) == 1:  # of torch or numpy
        row = row.tolist()
    if not isinstance(row, list | tuple):
        raise ValueError(f"{where} {_described(row)}: expected a list of token ids.")
    return [token if type(token) is int else _whole(token, where) for token in row]


def _whole(token: Any, where: str) -> int:
    """A number of numpy or torch, which is no `int`."""
    of_bools = isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))
    if not of_bools and getattr(token, "ndim", 0) == 0:
        with suppress(TypeError):
            return index(token)
    raise ValueError(f"{where} {_described(token)} among the tokens: expected token ids, whole numbers.")


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    shown = f" ({value!r})" if isinstance(value, bool | int | float | str) and len(repr(value)) <= 40 else ""
    return "None" if value is None else f"a {type(value).__name__}{shape}{shown}"
