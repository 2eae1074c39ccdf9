"""Validates the answers of a vLLM server; anything unexpected is a `ServerError` that says what was received.

n prompts
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_opsd.errors import ServerError
from trl_opsd.http.bounded_http import MIB
from trl_opsd.rollout.entries import Reader, are_ids, is_count, is_finite, shown
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.types import Completion

_EXPECTED = {
    "token_ids": "token ids, integers of at least 0",
    "prompt_token_ids": "token ids, integers of at least 0",
    "prompt_logprobs": "one entry for each token of the prompt",
    "token_logprobs": "a finite number for each token it wrote",
    "get_world_size": "a number of workers, at least 1",
    "max_model_len": "a number of tokens, at least 1",
    "block_size": "a number of tokens, at least 1",
}
_of = Reader("The vLLM server", _EXPECTED)

_BYTES_PER_TOKEN = 1024
"""Bytes per token with one log-probability in an answer: about 100, and its escaped text."""
_TOKENS_BY_DEFAULT = 16
"""Tokens a server generates if `max_tokens` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The configuration that a server reports."""

    model: str
    """The name that requests have to give its model."""
    dtype: torch.dtype
    """The dtype it computes in."""
    context: int
    """Context length in tokens, prompt and completion together."""
    block_size: int
    """Tokens in a block of its prefix cache."""


def facts(info: dict[str, Any], model: str) -> ServerFacts:
    """Reads the configuration that a server reports; `model` is the name of its model."""
    config, cache = _of(info, "model_config", dict), _of(info, "cache_config", dict)
    name = _of(config, "dtype", str).removeprefix("torch.")
    known = {str(dtype).removeprefix("torch."): dtype for dtype in RELATIVE}
    if name not in known:
        raise ServerError(f"The vLLM server says it computes in {name!r}: expected one of {sorted(known)}.")
    return ServerFacts(
        model=model,
        dtype=known[name],
        context=_of(config, "max_model_len", int, is_count),
        block_size=_of(cache, "block_size", int, is_count),
    )


def world_size(answer: Any) -> int:
    """The number of workers of a server, from its answer."""
    return int(_of({"get_world_size": answer}, "get_world_size", int, is_count))


def max_answer_bytes(prompt_ids: list[list[int]], options: dict[str, Any]) -> int:
    """Upper bound on the size of an answer with completions, in bytes."""
    written = options.get("max_tokens", _TOKENS_BY_DEFAULT) * len(prompt_ids)
    each = 1 + max(options.get(name) or 0 for name in ("logprobs", "prompt_logprobs"))
    return MIB + (sum(map(len, prompt_ids)) + written) * each * _BYTES_PER_TOKEN


def completions(answer: dict[str, Any], prompt_ids: list[list[int]], options: dict[str, Any]) -> list[Completion]:
    """The completions in an answer, in the order of the request's n prompts; exactly one for each."""
    choices = _of(answer, "choices", list)
    if not all(isinstance(choice, dict) for choice in choices):
        raise ServerError("The vLLM server answered `choices` that are not JSON objects.")
    found = sorted(_of(choice, "index", int) for choice in choices)
    if found != list(range(len(prompt_ids))):
        raise ServerError(
            f"The vLLM server answered completions {shown(found)} to {len(prompt_ids)} prompts: expected one for each."
        )
    in_order = sorted(choices, key=lambda choice: int(choice["index"]))  # the API promises no order
    return [_one(choice, ids, options) for choice, ids in zip(in_order, prompt_ids, strict=True)]


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Turns errors of TRL's client on an answer to `what` into a `ServerError`."""
    try:
        yield
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"The vLLM server's answer to {what} is incomplete or malformed: {error!r}.") from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # TRL reports a status with a bare `Exception`.
        raise ServerError(f"The vLLM server, asked for {what}: {str(error)[:500]}") from error


def _one(choice: dict[str, Any], prompt_ids: list[int], options: dict[str, Any]) -> Completion:
    completion_ids = _of(choice, "token_ids", list, are_ids)
    most = options.get("max_tokens", _TOKENS_BY_DEFAULT)
    if len(completion_ids) > most:
        raise ServerError(f"The vLLM server wrote {len(completion_ids)} tokens, but was asked for at most {most}.")
    if _of(choice, "prompt_token_ids", list, are_ids) != prompt_ids:
        raise ServerError(
            f"The vLLM server answered a different prompt from the one sent: expected {shown(prompt_ids)}, got "
            f"{shown(choice['prompt_token_ids'])}."
        )
    return Completion(
        prompt_ids=list(prompt_ids),
        completion_ids=completion_ids,
        prompt_logprobs=[] if options.get("prompt_logprobs") is None else _prompt_logprobs(choice, prompt_ids),
        logprobs=[] if options.get("logprobs") is None else _completion_logprobs(choice, len(completion_ids)),
    )


def _prompt_logprobs(choice: dict[str, Any], prompt_ids: list[int]) -> list[float]:
    """The log-probability of each prompt token but the first, which has no context."""
    entries = _of(choice, "prompt_logprobs", list, lambda one: len(one) == len(prompt_ids))
    pairs = list(zip(entries, prompt_ids, strict=True))[1:]
    if not all(isinstance(entry, dict) and isinstance(entry.get(str(token)), dict) for entry, token in pairs):
        raise ServerError("The vLLM server left out the log-probability of a prompt token.")
    return [_of(entry[str(token)], "logprob", float, is_finite) for entry, token in pairs]


def _completion_logprobs(choice: dict[str, Any], tokens: int) -> list[float]:
    found = _of(choice, "logprobs", dict)
    return list(_of(found, "token_logprobs", list, lambda these: len(these) == tokens and all(map(is_finite, these))))
