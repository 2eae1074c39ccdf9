"""Refuses `generation_kwargs` that an engine does not know, or that another option of the trainer decides."""

from __future__ import annotations

import difflib
from typing import Any

_SET_HERE = {
    "max_tokens": "max_completion_length",
    "stop_token_ids": "the end tokens of the tokenizer and the model",
    "ignore_eos": "the end tokens of the tokenizer and the model",
    "logprobs": "vllm_sync_check",
    "prompt_logprobs": "vllm_sync_check",
    "allowed_token_ids": "the vocabulary of the student",
    "output_kind": "the trainer",
    "detokenize": "the trainer",
}
"""Options of an engine that are ours to set, and what decides them."""


def checked_kwargs(generation_kwargs: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """`generation_kwargs` as they are.

    Args:
        generation_kwargs (`dict`):
            As the user gave them.
        known (`list[str]`):
            Options that the engine has.

    Raises:
        ValueError: One is not an option of vLLM, or is ours to set.
    """
    for name, value in generation_kwargs.items():
        shown = f"`generation_kwargs={{{name!r}: {value!r}}}`"
        if name in _SET_HERE:
            raise ValueError(f"{shown} would override what {_SET_HERE[name]} decides: remove it.")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see `vllm.SamplingParams` for those it has."
            raise ValueError(f"{shown} is not an option of vLLM: {hint}")
    return generation_kwargs
