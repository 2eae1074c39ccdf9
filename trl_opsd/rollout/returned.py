"""Validates what a rollout backend returned."""

from __future__ import annotations

from contextlib import suppress
from operator import index
from typing import Any

from trl_opsd.host import Host
from trl_opsd.rollout.base import RolloutBackend, cut_after_end


def checked_completions(backend: RolloutBackend, host: Host, prompt_ids: list[list[int]]) -> list[list[int]]:
    """One completion for each prompt, up to its first end token.

    Args:
        backend ([`RolloutBackend`]):
            Generates them. It gets a copy of the prompts, so that changing them does not change what is trained on.
        host ([`~host.Host`]):
            The trainer, with the end tokens and the limits of a completion.
        prompt_ids (`list[list[int]]`):
            The prompts, not padded.

    Raises:
        ValueError: It did not return token ids that the models can read.
    """
    name = type(backend).__name__
    returned = backend.complete([list(ids) for ids in prompt_ids], host.state.global_step)
    completions = [cut_after_end(ids, host.eos_token_ids) for ids in _token_ids(returned, len(prompt_ids), name)]
    for prompt, completion in zip(prompt_ids, completions, strict=True):
        host.limits.check_completion(prompt, completion, name)
    return completions


def _token_ids(returned: Any, prompts: int, backend: str) -> list[list[int]]:
    """What a rollout returned, as lists of integers; whether they are in the vocabulary is not checked here."""
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
    """An integer scalar of numpy or torch, as `int`."""
    of_bools = isinstance(token, bool) or "bool" in str(getattr(token, "dtype", ""))
    if not of_bools and getattr(token, "ndim", 0) == 0:
        with suppress(TypeError):
            return index(token)
    raise ValueError(f"{where} {_described(token)} among the tokens: expected token ids, which are integers.")


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    shown = f" ({value!r})" if isinstance(value, bool | int | float | str) and len(repr(value)) <= 40 else ""
    return "None" if value is None else f"a {type(value).__name__}{shape}{shown}"
