"""Validates the answers of an SGLang server; anything unexpected is a `ServerError` that says what was received.

n prompts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from trl_opsd.errors import ServerError
from trl_opsd.http.bounded_http import MIB, Answer
from trl_opsd.rollout.entries import Reader, are_ids, is_count, is_finite, shown
from trl_opsd.rollout.sglang_options import GRAMMARS
from trl_opsd.types import Completion

_of = Reader(
    "The SGLang server",
    {
        "output_ids": "token ids, integers of at least 0",
        "id": "the id of the request",
        "tp_size": "a number of workers, at least 1",
        "page_size": "a number of tokens, at least 1",
        "max_req_input_len": "a number of tokens, at least 1",
        "finish_reason": "an object that says why the completion ended",
        "input_token_logprobs": "the log-probability and id of each token of the prompt, the first without one",
        "output_token_logprobs": "a finite log-probability and the id of each token that it wrote",
    },
)
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
_BYTES_PER_TOKEN = 1024
"""Bytes per token with its log-probability in an answer: about 60, and its escaped text."""
_BYTES_PER_ROW = 8192
"""Bytes of a row's metadata in an answer: about 700."""
_AFTER_LONGEST = 5
"""Tokens that fit after the longest prompt that a server accepts."""
_UNUSED = 2
"""Tokens of its context that a server leaves unused."""


Read: TypeAlias = Callable[[Answer], list[Completion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangFacts:
    """The configuration that a server reports."""

    dtype: torch.dtype
    """The dtype it computes in."""
    device: str
    """The type of its device: `"cuda"`, `"cpu"`, ..."""
    longest_prompt: int
    """Tokens of the longest prompt that it accepts."""
    room: int
    """Tokens of prompt and completion together."""
    block_size: int
    """Tokens in a block of its prefix cache."""
    workers: int
    """Processes that hold a part of the weights."""

    @property
    def context(self) -> int:
        """The context length that the server was started with."""
        return self.room + _UNUSED


def facts(info: dict[str, Any]) -> SGLangFacts:
    """Reads the configuration that a server reports; rejects what this package cannot work with."""
    dtype = _of(info, "dtype", str)
    if dtype not in _DTYPES:
        raise ValueError(
            f"The SGLang server was started with `--dtype {dtype}`, and does not say what that became: start it with "
            "`--dtype bfloat16`, 'float32' or 'float16', as the student computes."
        )
    for name, what in (("dp_size", "--data-parallel-size"), ("pp_size", "--pipeline-parallel-size")):
        if (size := _of(info, name, int)) != 1:
            raise ValueError(
                f"The SGLang server was started with `{what} {size}`: SGLang takes new weights only without; use "
                "`--tensor-parallel-size`."
            )
    if _of(info, "enable_deterministic_inference", bool):
        raise ValueError(
            "The SGLang server was started with `--enable-deterministic-inference`, which samples all completions with "
            "the same numbers: start it without."
        )
    longest = _of(info, "max_req_input_len", int, is_count) - 1  # the server refuses this many
    return SGLangFacts(
        dtype=_DTYPES[dtype],
        device=_of(info, "device", str),
        longest_prompt=longest,
        room=longest + _AFTER_LONGEST,
        block_size=_of(info, "page_size", int, is_count),
        workers=_of(info, "tp_size", int, is_count),
    )


def max_answer_bytes(prompt_ids: Sequence[Sequence[int]], most: Sequence[int]) -> int:
    """Upper bound on the size of an answer with completions, in bytes."""
    return MIB + (sum(map(len, prompt_ids)) + sum(most)) * _BYTES_PER_TOKEN + len(most) * _BYTES_PER_ROW


def completion(
    row: Any, name: str, prompt_ids: list[int], sampling: dict[str, Any], scored: bool | None, version: str | None
) -> Completion:
    """The completion of a prompt in an answer's `row`, which must be of this request and weights `version`."""
    if not isinstance(row, dict):
        raise ServerError(f"The SGLang server answered {shown(row)} for a row: expected an object.")
    told = _of(row, "meta_info", dict)
    if _of(told, "id", str) != name or _of(told, "prompt_tokens", int) != len(prompt_ids):
        raise ServerError(
            f"The SGLang server answered another request than was sent: expected {len(prompt_ids)} tokens of prompt "
            f"and the id {name!r}, got {told['prompt_tokens']!r} and {told['id']!r}."
        )
    completion_ids = _of(row, "output_ids", list, are_ids)
    _check_end(_of(told, "finish_reason", dict), completion_ids, sampling)
    _check_version(told, version)
    # `scored` is `None` for no log-probabilities, False for those of the completion only.
    return Completion(
        prompt_ids=list(prompt_ids),
        completion_ids=completion_ids,
        prompt_logprobs=_logprobs(told, "input_token_logprobs", prompt_ids)[1:] if scored else [],
        logprobs=[] if scored is None else _logprobs(told, "output_token_logprobs", completion_ids),
    )


def _check_end(why: dict[str, Any], completion_ids: list[int], sampling: dict[str, Any]) -> None:
    most, ends = sampling["max_new_tokens"], sampling["stop_token_ids"]
    kind = why.get("type")
    if kind == "length" and len(completion_ids) == most:
        return
    if kind == "stop" and completion_ids and len(completion_ids) <= most and completion_ids[-1] == why.get("matched"):
        if completion_ids[-1] in ends or any(sampling.get(grammar) for grammar in GRAMMARS):
            return
        raise ServerError(
            f"The SGLang server ended a completion at token {completion_ids[-1]}, an end token of the model it was "
            f"started with: those of the student are {ends}. Start it with a checkpoint that has the same."
        )
    raise ServerError(
        f"The SGLang server wrote {len(completion_ids)} tokens and says that the completion ended with {shown(why)}: "
        f"expected {most} tokens, or fewer with one of {shown(ends)} as the last."
    )


def _check_version(told: dict[str, Any], version: str | None) -> None:
    if version is None:
        return
    spans = [span.get("version") if isinstance(span, dict) else span for span in told.get("weight_versions") or ()]
    found = {*map(str, spans), _of(told, "weight_version", str)}
    if found != {version}:
        raise ServerError(
            f"The SGLang server wrote with the weights {sorted(found)}, but {version!r} were sent last: something else "
            "has sent it weights. Use it for a single training run."
        )


def _logprobs(told: dict[str, Any], name: str, ids: list[int]) -> list[float]:
    """The log-probability of each token; the first of a prompt has none, and is 0 here."""
    first = name == "input_token_logprobs"

    def fits(entries: list[Any]) -> bool:
        pairs = [entry[:2] if isinstance(entry, list) else [] for entry in entries]
        if [pair[1] if len(pair) == 2 else None for pair in pairs] != ids:
            return False
        return all(is_finite(pair[0]) for pair in pairs[first:])

    entries = _of(told, name, list, fits)
    return [0.0 if first and not number else float(entry[0]) for number, entry in enumerate(entries)]
