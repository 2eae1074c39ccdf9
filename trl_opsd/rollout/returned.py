"""Validates what a rollout backend returned or yielded, or what the `complete` of a subclass returned."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import suppress
from operator import index
from typing import Any

import numpy as np

from trl_opsd.parallel.prefetch import Closable
from trl_opsd.rollout.host import Host
from trl_opsd.types.rollout import cut_after_end

_TELLING = 8
"""Prompt tokens per batch above which a repetition is no coincidence."""


def checked_completions(returned: Any, host: Host, prompt_ids: list[list[int]], name: str) -> list[list[int]]:
    """One completion for each prompt, validated against the limits and cut after its first end token."""
    completions = [cut_after_end(ids, host.eos_token_ids) for ids in rows_of(returned, len(prompt_ids), name)]
    limits = host.limits
    for completion in completions:
        limits.check_completion(completion, name)
    return completions


def checked_stream(stream: Any, host: Host, prompt_ids: list[list[int]], name: str) -> Closable[tuple[int, list[int]]]:
    """The rows of a stream as they come, each prompt once, validated as by [`checked_completions`]."""
    # Closing this closes the stream.
    return Closable(_checked(stream, host, prompt_ids, name), getattr(stream, "close", None))


def _checked(
    stream: Any, host: Host, prompt_ids: list[list[int]], name: str
) -> Generator[tuple[int, list[int]], None, None]:
    missing = dict.fromkeys(range(len(prompt_ids)))
    try:
        for place, ids in stream:
            row = index(place)
            if row not in missing:
                again = "a second time" if 0 <= row < len(prompt_ids) else f"for {len(prompt_ids)} prompts"
                raise ValueError(f"{name} yielded row {row} {again}: expected each row once, starting from 0.")
            del missing[row]
            completion = cut_after_end(_row_of(ids, f"{name} yielded for prompt {row}"), host.eos_token_ids)
            host.limits.check_completion(completion, name)
            yield row, completion
    finally:
        # Also where the trainer stops in the middle: what is still generated would be for nothing.
        if hasattr(stream, "close"):
            stream.close()
    if missing:
        raise ValueError(
            f"{name} yielded {len(prompt_ids) - len(missing)} completions for {len(prompt_ids)} prompts, none for row "
            f"{next(iter(missing))}: `stream` must yield one per prompt."
        )


def begin_with_prompts(completions: Sequence[list[int]], prompt_ids: Sequence[list[int]], padding: set[int]) -> bool:
    """Whether each completion begins with its whole prompt, as what `generate` returns does."""
    tokens = 0
    for prompt, completion in zip(prompt_ids, completions, strict=True):
        # `generate` pads shorter prompts on the left; a completion of padding alone tells nothing.
        start = next((place for place, token in enumerate(completion) if token not in padding), None)
        if start is None:
            continue
        if completion[start : start + len(prompt)] != prompt and completion[: len(prompt)] != prompt:
            return False
        tokens += len(prompt)
    return tokens >= _TELLING


# ---- Token ids from any library, as lists of integers; limits and vocabulary are checked above -----------------------


def rows_of(returned: Any, prompts: int, backend: str) -> list[list[int]]:
    """One completion for each prompt; `backend` names who returned them, for messages."""
    is_list = isinstance(returned, list | tuple)
    if not is_list or len(returned) != prompts:
        given = f"{len(returned)} completions" if is_list else _described(returned)
        raise ValueError(
            f"{backend} returned {given} for {prompts} prompts: `complete` must return a list with one completion per "
            "prompt, in order and without padding."
        )
    return [_row_of(row, f"{backend} returned for prompt {number}") for number, row in enumerate(returned)]


def _row_of(row: Any, where: str) -> list[int]:
    """One completion, from a list or an array of one dimension; else a `ValueError` that begins with `where`.

    A mask is refused, which Python and numpy would take for the tokens 0 and 1.
    """
    given = row.tolist() if hasattr(row, "tolist") else row  # of torch or numpy
    with suppress(ValueError):  # lists of unequal lengths
        ids = np.asarray(given)
        if ids.ndim == 1 and (not len(ids) or (ids.dtype.kind in "iu" and bool not in map(type, given))):
            return [int(token) for token in ids]
    raise ValueError(f"{where} {_described(row)}: expected a list of token ids, which are integers of 64 bits.")


def _described(value: Any) -> str:
    """The type of a value, with its shape, or the value if short."""
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    shown = f" ({value!r})" if len(repr(value)) <= 40 else ""
    return f"a {type(value).__name__}{shape or shown}"
