"""Translates the trainer's generation options into `vllm.SamplingParams`; `generation_kwargs` may add to them."""

from __future__ import annotations

from typing import Any

from trl_opsd._compat.vllm import supported
from trl_opsd.config import OPSDConfig
from trl_opsd.options.normalize import ENDS
from trl_opsd.options.rules import refuse


def sampling_options(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """Sampling options of every completion but its length; it ends with the first of `end_ids`, and nothing else."""
    return supported.checked(_options(args, end_ids))


def request_options(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """As [`sampling_options`], for the body of a request; rejects names that a server would ignore."""
    given, known = _options(args, end_ids), supported.request_options()
    for name, value in given.items():
        what = f"`generation_kwargs={{{name!r}: {value!r}}}`"
        refuse([(name not in known, what, "this is not an option of a vLLM server")])
    supported.checked(given)
    return given


def _options(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    more = {name: value for name, value in (args.generation_kwargs or {}).items() if name not in ENDS}
    given = {
        "temperature": args.temperature,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "top_k": args.top_k or 0,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty or 1.0,
        "stop_token_ids": end_ids,
        # The end token that vLLM reads from the tokenizer is among ours already, if there is one.
        "ignore_eos": True,
        **more,
    }
    if args.vllm_structured_outputs_regex is not None:
        given["structured_outputs"] = {"regex": args.vllm_structured_outputs_regex}
    return given
