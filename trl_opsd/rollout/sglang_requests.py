"""A request to an SGLang server for completions: its options, its body, and how its response is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from trl_opsd._compat.server import pydantic
from trl_opsd.config import OPSDConfig
from trl_opsd.errors import ServerError
from trl_opsd.http.client import MIB, Response, Responses, Schema, TokenId, shown
from trl_opsd.options.foreign_names import nearest
from trl_opsd.rollout.engine import Row
from trl_opsd.types import Completion

_MAX_PENALTY = 2.0
"""The largest repetition penalty that SGLang accepts."""
_BYTES_PER_TOKEN = 1024
"""Bytes per token with its log-probability in a response: about 60, and its escaped text."""
_BYTES_PER_ROW = 8192
"""Bytes of a row's metadata in a response: about 700."""
_OF_THE_PROTOCOL = ("logprobs", "prompt_logprobs", "max_tokens", "seed")
"""Options that SGLang names differently or ignores."""

_GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
"""Options that end a completion where the grammar does."""
_KNOWN = (
    "temperature", "frequency_penalty", "presence_penalty", "min_new_tokens", "logit_bias", "custom_params",
    "stop_token_ids", "ignore_eos", *_GRAMMARS,
)  # fmt: skip
_STOP = "SGLang would look for text, but a rollout is token ids: use 'stop_token_ids'"
_REFUSED = {
    "eos_token_id": "SGLang ends completions at every end token of its model: add others with 'stop_token_ids'",
    "stop": _STOP,
    "stop_regex": _STOP,
    "sampling_seed": "SGLang reads it only with `--enable-deterministic-inference`, where all rows have the "
    "same numbers: start the server with `--random-seed`",
    "beam_width": "a rollout is sampled: remove it",
}


def sampling_params(args: OPSDConfig, end_ids: list[int]) -> dict[str, Any]:
    """The `sampling_params` of every completion but its length; it ends with the first of `end_ids`."""
    given = args.generation_kwargs or {}
    for name, value in given.items():
        _check(name, value)
    if given.get("ignore_eos") and given.get("stop_token_ids"):
        raise ValueError(
            f"`generation_kwargs={given}`: SGLang's 'ignore_eos' ignores 'stop_token_ids' as well: remove one of them."
        )
    if (args.repetition_penalty or 1.0) > _MAX_PENALTY:
        raise ValueError(
            f"`repetition_penalty={args.repetition_penalty}`: SGLang takes numbers up to {_MAX_PENALTY}: lower it."
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


class GenerateRequest:
    """A request for completions, with options for each prompt; prompt and completion have at most `room` tokens."""

    def __init__(self, rows: Sequence[Row], room: int, version: str | None) -> None:
        self._prompts = [ids for ids, _ in rows]
        # A response repeats the name of each row.
        self._names = [f"{uuid4().hex}-{number}" for number in range(len(rows))]
        self._sampling = [_row_sampling(ids, options, room) for ids, options in rows]
        self._scored = [_scored(options) for _, options in rows]
        self._version = version  # of now: newer weights may be sent before the response is read
        self.body = {
            "rid": self._names,
            "input_ids": self._prompts,
            "sampling_params": self._sampling,
            "return_logprob": [scored is not None for scored in self._scored],
            "logprob_start_len": [0 if scored else -1 for scored in self._scored],
        }
        tokens = sum(map(len, self._prompts)) + sum(one["max_new_tokens"] for one in self._sampling)
        self.max_bytes = MIB + tokens * _BYTES_PER_TOKEN + len(rows) * _BYTES_PER_ROW

    def completions(self, response: Response) -> list[Completion]:
        """The completions of the prompts, in their order."""
        rows = response.parse(_Rows).root
        if len(rows) != len(self._prompts):
            raise ServerError(f"The SGLang server answered {len(rows)} rows to {len(self._prompts)} prompts.")
        sent = zip(rows, self._names, self._prompts, self._sampling, self._scored, strict=True)
        return [row.completion(name, ids, sampling, scored, self._version) for row, name, ids, sampling, scored in sent]


def _row_sampling(ids: list[int], options: dict[str, Any], room: int) -> dict[str, Any]:
    others = {name: value for name, value in options.items() if name not in _OF_THE_PROTOCOL}
    return {"stop_token_ids": [], **others, "max_new_tokens": min(options["max_tokens"], room - len(ids))}


def _scored(options: dict[str, Any]) -> bool | None:
    """Whether log-probabilities of the prompt are requested, or only of the completion; `None` for neither."""
    if options.get("prompt_logprobs") is not None:
        return True
    return None if options.get("logprobs") is None else False


class SGLangRows:
    """The number of each prompt and its completion, as they end; those in `unsent` are known already."""

    def __init__(self, unsent: dict[int, Completion], numbers: Sequence[int], responses: Responses[Completion]) -> None:
        self._unsent, self._numbers, self._responses = unsent, numbers, responses

    def __iter__(self) -> Iterator[tuple[int, Completion]]:
        yield from self._unsent.items()
        for number, row in self._responses:
            yield self._numbers[number], row

    def close(self) -> None:
        """Cancels what has not ended; called from any thread, also while another waits for the next."""
        self._responses.close()


class _WeightSpan(Schema):
    version: str


_Logprob = tuple[pydantic.FiniteFloat | None, TokenId, Any]
"""Log-probability, token id, and its text."""


class _Meta(Schema):
    model_config = pydantic.ConfigDict(strict=False)  # tuples are lists in JSON
    id: str
    prompt_tokens: int
    finish_reason: dict[str, Any]
    weight_version: str | None = None
    weight_versions: list[_WeightSpan] | None = None
    input_token_logprobs: list[_Logprob] | None = None
    output_token_logprobs: list[_Logprob] | None = None


class _Row(Schema):
    output_ids: list[TokenId]
    meta_info: _Meta

    def completion(
        self, name: str, ids: list[int], sampling: dict[str, Any], scored: bool | None, version: str | None
    ) -> Completion:
        """The completion of a prompt; a `ServerError` unless it is of this request and of weights `version`."""
        meta = self.meta_info
        if meta.id != name or meta.prompt_tokens != len(ids):
            raise ServerError(
                f"The SGLang server answered another request than was sent: expected {len(ids)} tokens of prompt and "
                f"the id {name!r}, got {meta.prompt_tokens!r} and {meta.id!r}."
            )
        self._check_end(sampling)
        found = {meta.weight_version, *(span.version for span in meta.weight_versions or ())}
        if version is not None and found != {version}:
            raise ServerError(
                f"The SGLang server wrote with the weights {sorted(map(str, found))}, but {version!r} were sent last: "
                "something else has sent it weights. Use it for a single training run."
            )
        # `scored` is `None` for no log-probabilities, False for those of the completion only.
        of_prompt = _logprobs("input_token_logprobs", meta.input_token_logprobs, ids, first=1) if scored else []
        logprobs = (
            [] if scored is None else _logprobs("output_token_logprobs", meta.output_token_logprobs, self.output_ids)
        )
        return Completion(
            prompt_ids=list(ids), completion_ids=self.output_ids, prompt_logprobs=of_prompt, logprobs=logprobs
        )

    def _check_end(self, sampling: dict[str, Any]) -> None:
        ids, reason = self.output_ids, self.meta_info.finish_reason
        limit, ends = sampling["max_new_tokens"], sampling["stop_token_ids"]
        kind = reason.get("type")
        if kind == "length" and len(ids) == limit:
            return
        if kind == "stop" and ids and len(ids) <= limit and ids[-1] == reason.get("matched"):
            if ids[-1] in ends or any(sampling.get(grammar) for grammar in _GRAMMARS):
                return
            raise ServerError(
                f"The SGLang server ended a completion at token {ids[-1]}, an end token of the model it was started "
                f"with: those of the student are {ends}. Start it with a checkpoint that has the same."
            )
        raise ServerError(
            f"The SGLang server wrote {len(ids)} tokens and says that the completion ended with {shown(reason)}: "
            f"expected {limit} tokens, or fewer with one of {shown(ends)} as the last."
        )


class _Rows(pydantic.RootModel[list[_Row]]):
    """The rows of a response."""


def _logprobs(name: str, entries: list[_Logprob] | None, ids: list[int], first: int = 0) -> list[float]:
    """The log-probabilities of the tokens from the first that has one."""
    logprobs = [logprob for logprob, _, _ in (entries or [])[first:] if logprob is not None]
    if [token for _, token, _ in entries or []] != ids or len(logprobs) != max(len(ids) - first, 0):
        raise ServerError(
            f"The SGLang server answered {name}={shown(entries)}: expected a finite log-probability and the id of each "
            f"of {len(ids)} tokens{', the first without one' if first else ''}."
        )
    return logprobs
