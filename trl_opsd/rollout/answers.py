"""Says what the answers of a vLLM server have to look like; anything else is a `ServerError` that says what came.

n prompts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_opsd.rollout.bounded_http import MIB
from trl_opsd.rollout.sync_proof import RELATIVE
from trl_opsd.run.errors import ServerError
from trl_opsd.types import Completion

_BYTES_PER_TOKEN = 1024
"""What a server says of one token with one log-probability: about 100 bytes, and its text, escaped."""
_TOKENS_BY_DEFAULT = 16
"""What a server writes if it is not told how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says it runs."""

    dtype: torch.dtype
    """What it computes in."""
    context: int
    """Tokens of prompt and completion together."""
    block_size: int
    """Tokens that are cached together."""


def facts(info: dict[str, Any]) -> ServerFacts:
    """What a server's configuration says.

    Raises:
        ServerError: It lacks something, or says something that cannot be.
    """
    model, cache = _of(info, "model_config", dict), _of(info, "cache_config", dict)
    name = _of(model, "dtype", str).removeprefix("torch.")
    known = {str(dtype).removeprefix("torch."): dtype for dtype in RELATIVE}
    if name not in known:
        raise ServerError(f"The vLLM server says it computes in {name!r}: expected one of {sorted(known)}.")
    return ServerFacts(
        dtype=known[name],
        context=_of(model, "max_model_len", int, _is_count),
        block_size=_of(cache, "block_size", int, _is_count),
    )


def world_size(answer: Any) -> int:
    """How many workers a server has.

    Raises:
        ServerError: It says something else than a number of them.
    """
    return int(_of({"get_world_size": answer}, "get_world_size", int, _is_count))


def most_bytes(prompt_ids: list[list[int]], options: dict[str, Any]) -> int:
    """The longest answer that so many tokens can take."""
    written = options.get("max_tokens", _TOKENS_BY_DEFAULT) * len(prompt_ids)
    each = 1 + max(options.get(name) or 0 for name in ("logprobs", "prompt_logprobs"))
    return MIB + (sum(map(len, prompt_ids)) + written) * each * _BYTES_PER_TOKEN


def written(answer: dict[str, Any], prompt_ids: list[list[int]], options: dict[str, Any]) -> list[Completion]:
    """The completions in an answer, in the order of the prompts.

    Args:
        answer (`dict`):
            What came.
        prompt_ids (`list[list[int]]`):
            What was asked, n of them.
        options (`dict`):
            With which.

    Raises:
        ServerError: They are not one for each prompt, or one is not what a server can have written.
    """
    choices = _of(answer, "choices", list)
    if not all(isinstance(choice, dict) for choice in choices):
        raise ServerError("The vLLM server answered `choices` that are no objects.")
    found = sorted(_of(choice, "index", int) for choice in choices)
    if found != list(range(len(prompt_ids))):
        raise ServerError(
            f"The vLLM server answered completions {_shown(found)} to {len(prompt_ids)} prompts: expected one for each."
        )
    in_order = sorted(choices, key=lambda choice: int(choice["index"]))
    return [_one(choice, ids, options) for choice, ids in zip(in_order, prompt_ids, strict=True)]


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Lets an answer that TRL's client could not read be a `ServerError`."""
    try:
        yield
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"The vLLM server's answer to {what} lacks what it should say: {error!r}.") from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        # TRL's way to tell of a status
        raise ServerError(f"The vLLM server, asked for {what}: {str(error)[:500]}") from error


def _one(choice: dict[str, Any], prompt_ids: list[int], options: dict[str, Any]) -> Completion:
    completion_ids = _of(choice, "token_ids", list, _are_ids)
    most = options.get("max_tokens", _TOKENS_BY_DEFAULT)
    if len(completion_ids) > most:
        raise ServerError(f"The vLLM server wrote {len(completion_ids)} tokens, it was asked for at most {most}.")
    if _of(choice, "prompt_token_ids", list, _are_ids) != prompt_ids:
        raise ServerError(
            f"The vLLM server answered another prompt than it was sent: expected {_shown(prompt_ids)}, got "
            f"{_shown(choice['prompt_token_ids'])}."
        )
    return Completion(
        prompt_ids=list(prompt_ids),
        completion_ids=completion_ids,
        prompt_logprobs=[] if options.get("prompt_logprobs") is None else _scored(choice, prompt_ids),
        logprobs=[] if options.get("logprobs") is None else _chosen(choice, len(completion_ids)),
    )


def _scored(choice: dict[str, Any], prompt_ids: list[int]) -> list[float]:
    """The log-probability of each prompt token but the first, which follows nothing."""
    told = _of(choice, "prompt_logprobs", list, lambda one: len(one) == len(prompt_ids))
    if not all(isinstance(at, dict) and isinstance(at.get(str(ids)), dict) for at, ids in _but_first(told, prompt_ids)):
        raise ServerError("The vLLM server left out the log-probability of a prompt token.")
    return [_of(at[str(ids)], "logprob", float, _is_finite) for at, ids in _but_first(told, prompt_ids)]


def _but_first(told: list[Any], prompt_ids: list[int]) -> list[tuple[Any, int]]:
    return list(zip(told, prompt_ids, strict=True))[1:]


def _chosen(choice: dict[str, Any], tokens: int) -> list[float]:
    told = _of(choice, "logprobs", dict)
    return list(_of(told, "token_logprobs", list, lambda these: len(these) == tokens and all(map(_is_finite, these))))


def _of(found: dict[str, Any], name: str, kind: type, holds: Callable[[Any], bool] = lambda value: True) -> Any:
    """One entry of an answer, which has to be of a kind and to hold to something."""
    value = found.get(name)
    fits = _is_finite(value) if kind is float else isinstance(value, kind) and not isinstance(value, bool)
    if not (fits and holds(value)):
        expected = _EXPECTED.get(name, f"of type {kind.__name__}")
        raise ServerError(f"The vLLM server answered {name}={_shown(value)}: expected {expected}.")
    return value


_EXPECTED = {
    "token_ids": "token ids, whole numbers from 0 on",
    "prompt_token_ids": "token ids, whole numbers from 0 on",
    "prompt_logprobs": "one entry for each token of the prompt",
    "token_logprobs": "a finite number for each token it wrote",
    "get_world_size": "a number of workers from 1 on",
    "max_model_len": "a number of tokens from 1 on",
    "block_size": "a number of tokens from 1 on",
}


def _is_count(value: Any) -> bool:
    return bool(0 < value < 2**31)


def _is_finite(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 2**31 for value in values)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
