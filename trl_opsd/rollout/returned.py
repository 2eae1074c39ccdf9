"""Validates what a rollout backend, or the `complete` of a subclass, returned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import index
from typing import Any

from trl_opsd.host import Host
from trl_opsd.rollout.base import cut_after_end

_TELLING = 8
"""Prompt tokens in a batch from which on it is no chance that they occur again."""


def checked_completions(returned: Any, host: Host, prompt_ids: list[list[int]], name: str) -> list[list[int]]:
    """One completion for each prompt, up to its first end token.

    Args:
        returned (`Any`):
            What is to be checked.
        host ([`~host.Host`]):
            The trainer, with the end tokens and the limits of a completion.
        prompt_ids (`list[list[int]]`):
            The prompts, not padded.
        name (`str`):
            Who returned it, for messages.

    Raises:
        ValueError: These are not token ids that the models can read, or too many.
    """
    completions = [cut_after_end(ids, host.eos_token_ids) for ids in _token_ids(returned, len(prompt_ids), name)]
    for prompt, completion in zip(prompt_ids, completions, strict=True):
        host.limits.check_completion(prompt, completion, name)
    return completions


def begin_with_prompts(completions: Sequence[list[int]], prompt_ids: Sequence[list[int]], padding: set[int]) -> bool:
    """Whether each completion begins with its whole prompt, as what `generate` returns does.

    Args:
        completions (`Sequence[list[int]]`):
            Up to their first end token.
        prompt_ids (`Sequence[list[int]]`):
            Their prompts.
        padding (`set[int]`):
            Ids that `generate` may have written before a shorter prompt. A completion of nothing else tells nothing.
    """
    tokens = 0
    for prompt, completion in zip(prompt_ids, completions, strict=True):
        start = next((place for place, token in enumerate(completion) if token not in padding), None)
        if start is None:
            continue
        if completion[start : start + len(prompt)] != prompt and completion[: len(prompt)] != prompt:
            return False
        tokens += len(prompt)
    return tokens >= _TELLING


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
