"""Translates the trainer's generation options into SGLang's `sampling_params`; `generation_kwargs` may add to them."""

from __future__ import annotations

import json
from typing import Any

from trl_opsd.config import OPSDConfig
from trl_opsd.options.foreign_names import nearest

GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
"""Options that end a completion where the grammar does."""

_KNOWN = (
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "min_new_tokens",
    "logit_bias",
    "custom_params",
    "stop_token_ids",
    "ignore_eos",
    *GRAMMARS,
)
_REFUSED = {
    "eos_token_id": "SGLang ends completions at every end token of its model: add others with 'stop_token_ids'",
    "stop": "SGLang would look for text, but a rollout is token ids: use 'stop_token_ids'",
    "stop_regex": "SGLang would look for text, but a rollout is token ids: use 'stop_token_ids'",
    "sampling_seed": "SGLang reads it only with `--enable-deterministic-inference`, where all rows have the "
    "same numbers: start the server with `--random-seed`",
    "beam_width": "a rollout is sampled: remove it",
}
_MOST_PENALTY = 2.0
"""The largest repetition penalty that SGLang accepts."""


def sampling_params(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """The `sampling_params` of every completion but its length; it ends with the first of `end_ids`."""
    given = args.generation_kwargs or {}
    for name, value in given.items():
        _check(name, value)
    if given.get("ignore_eos") and given.get("stop_token_ids"):
        raise ValueError(
            f"`generation_kwargs={given}`: SGLang's 'ignore_eos' ignores 'stop_token_ids' as well: remove one of them."
        )
    if (args.repetition_penalty or 1.0) > _MOST_PENALTY:
        raise ValueError(
            f"`repetition_penalty={args.repetition_penalty}`: SGLang takes numbers up to {_MOST_PENALTY}: lower it."
        )
    return {
        "temperature": args.temperature,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "top_k": args.top_k or -1,  # -1: all tokens
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty or 1.0,
        **given,
        "stop_token_ids": end_ids,
        "ignore_eos": not end_ids,
    }


def _check(name: str, value: Any) -> None:
    shown = f"`generation_kwargs={{{name!r}: {value!r}}}`"
    if name in _REFUSED:
        raise ValueError(f"{shown}: {_REFUSED[name]}.")
    if name not in _KNOWN:
        close = nearest(name, _KNOWN)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it has {', '.join(_KNOWN)}."
        raise ValueError(f"{shown} is not an option of SGLang: {hint}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shown} cannot be sent to SGLang: {error}.") from error
