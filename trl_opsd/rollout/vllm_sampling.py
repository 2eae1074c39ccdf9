"""Translates the trainer's generation options into `vllm.SamplingParams`; `generation_kwargs` may add to them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from trl_opsd._compat.vllm import sampling_params
from trl_opsd.config import OPSDConfig
from trl_opsd.options.foreign_names import nearest
from trl_opsd.options.normalize import ENDS

_SET_HERE = {
    "logprobs": "vllm_sync_check",
    "prompt_logprobs": "vllm_sync_check",
    "allowed_token_ids": "the vocabulary of the student",
    "output_kind": "the trainer",
    "detokenize": "the trainer",
}
"""Options of an engine that the trainer sets, by what they follow from."""


def sampling_options(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """Sampling options of every completion but its length; it ends with the first of `end_ids`, and nothing else."""
    return sampling_params.checked(_options(args, end_ids, sampling_params.OPTIONS))


def request_options(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """As [`sampling_options`], for the body of a request, with a stricter check: a server ignores unknown names."""
    given = _options(args, end_ids, sampling_params.request_options())
    with sampling_params.refusals():
        json.dumps(given)
    sampling_options(args, end_ids)
    return given


def _options(args: OPSDConfig, end_ids: list[int], known: Collection[str]) -> dict[str, Any]:
    given = {
        "temperature": args.temperature,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty or 1.0,
        "stop_token_ids": end_ids,
        # The end token that vLLM reads from the tokenizer is among ours already, if there is one.
        "ignore_eos": True,
        **_checked_kwargs(args.generation_kwargs or {}, known),
    }
    if args.vllm_structured_outputs_regex is not None:
        given["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return given


def _checked_kwargs(generation_kwargs: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """`generation_kwargs` but the end tokens; rejects those that the engine does not know or the trainer sets."""
    others = {name: value for name, value in generation_kwargs.items() if name not in ENDS}
    for name, value in others.items():
        shown = f"`generation_kwargs={{{name!r}: {value!r}}}`"
        if name in _SET_HERE:
            raise ValueError(f"{shown} would override what {_SET_HERE[name]} decides: remove it.")
        if name not in known:
            close = nearest(name, known)
            hint = (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else "see `vllm.SamplingParams` for those it has."
            )
            raise ValueError(f"{shown} is not an option of vLLM: {hint}")
    return others
