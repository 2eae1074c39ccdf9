"""vLLM's pooling protocol, as far as a teacher needs it: validates requests, and encodes states as answers.

L tokens of a row · H hidden width
"""

from __future__ import annotations

import base64
import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from reprlib import repr as shown
from typing import Any

import torch
from torch import Tensor

from trl_opsd._compat import strict_json

TASK = "token_embed"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ENCODINGS = ("float", "base64", "bytes_only")
_ENDIANNESS = ("native", "little", "big")
_FIELDS = ("model", "input", "task", "use_activation", "encoding_format", "embed_dtype", "endianness")
_IGNORED = ("add_special_tokens", "cache_salt", "priority", "request_id", "user")
"""vLLM's fields that do not change the answer to a row of token ids."""
_KINDS = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""vLLM's names of errors, where they differ from HTTP's."""
_SLICE = 3 << 17
"""Numbers per piece of an answer; divisible by 3, so that base64 can be encoded piece by piece."""


class Refusal(Exception):
    """A request is answered with an error status; the message says what was got, what is expected, and what to do."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as vLLM formats it."""
        kind = _KINDS.get(self.status, HTTPStatus(self.status).phrase)
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model, as clients see it, and the limits of a request."""

    name: str
    """The model name in requests."""
    root: str
    """Path or id that it was loaded from."""
    revision: str | None
    """The commit it was loaded from, if it came from the Hub; else the option."""
    dtype: torch.dtype
    """The dtype that states are computed in."""
    vocabulary: int
    """Token ids from 0 to this, exclusive, are accepted."""
    width: int
    """H."""
    max_model_len: int
    """Maximum tokens of a row."""
    max_request_tokens: int
    """Maximum tokens of all rows of a request."""

    @property
    def max_body_bytes(self) -> int:
        """Byte limit of a request: a token id takes some ten characters at most."""
        return 2**16 + 16 * self.max_request_tokens

    def card(self) -> dict[str, Any]:
        """The answer of `/v1/models`: vLLM's fields, and some that only this server has."""
        of_vllm = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "trl_opsd"}
        dtype = str(self.dtype).removeprefix("torch.")
        more = {"revision": self.revision, "dtype": dtype, "vocab_size": self.vocabulary, "hidden_size": self.width}
        one = {**of_vllm, "root": self.root, "parent": None, "max_model_len": self.max_model_len, **more}
        return {"object": "list", "data": [one]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A validated request."""

    rows: list[Tensor]
    """[L] each, token ids."""
    encoding: str
    dtype: torch.dtype
    swapped: bool
    """Whether numbers are sent in the byte order that is not this machine's."""


def parse(content: bytes, served: Served) -> Wanted:
    """Validates the body of a request, of which nothing is trusted; raises `Refusal`."""
    try:
        asked = strict_json.loads(content)
    except ValueError as error:
        raise Refusal(400, f"The request is not JSON: {str(error)[:200]}.") from None
    if not isinstance(asked, dict):
        raise Refusal(400, f"The request is {_kind(asked)}: expected a JSON object.")
    if unknown := sorted(set(asked) - {*_FIELDS, *_IGNORED}):
        raise Refusal(400, f"Field {shown(unknown[0])} is not supported here: known are {', '.join(_FIELDS)}.")
    if (name := asked.get("model")) and name != served.name:
        raise Refusal(404, f"The model {shown(name)} does not exist: this server has {served.name!r}.")
    if asked.get("task", TASK) not in (None, TASK):
        raise Refusal(400, f"Unsupported task: {shown(asked['task'])}. Supported tasks: ({TASK!r},)")
    # vLLM's default normalises states, from which the loss could not be computed.
    if asked.get("use_activation") is not False:
        raise Refusal(400, "Send `use_activation: false`: states are answered as they are, never normalised.")
    encoding = _one_of(asked, "encoding_format", _ENCODINGS)
    endianness = _one_of(asked, "endianness", _ENDIANNESS)
    dtype = DTYPES[_one_of(asked, "embed_dtype", tuple(DTYPES))]
    return Wanted(
        rows=_rows(asked.get("input"), served),
        encoding=encoding,
        dtype=torch.float32 if encoding == "float" else dtype,  # as with vLLM, numbers in JSON are not rounded
        swapped=endianness not in ("native", sys.byteorder),
    )


def _one_of(asked: Mapping[str, Any], field: str, allowed: tuple[str, ...]) -> str:
    value: Any = asked.get(field, allowed[0])
    if value not in allowed:
        raise Refusal(400, f"`{field}` is {shown(value)}: expected one of {', '.join(map(repr, allowed))}.")
    return str(value)


def _rows(given: Any, served: Served) -> list[Tensor]:
    if not isinstance(given, list) or any(isinstance(one, str) for one in given):
        raise Refusal(
            400,
            f"`input` is {_kind(given)}: expected token ids, [17, 4] or [[17, 4], [3]]. This server has no tokenizer: "
            "tokenize text first.",
        )
    rows = given if any(isinstance(one, list) for one in given) else [given]
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise Refusal(400, f"Row {number} of `input` is {_kind(row)}: expected a list of token ids.")
        if not row:
            raise Refusal(400, f"Row {number} of `input` is empty: a prompt has at least one token.")
        if len(row) > served.max_model_len:
            raise Refusal(
                400,
                f"Row {number} of `input` has {len(row)} tokens, longer than the maximum model length of "
                f"{served.max_model_len}.",
            )
        for one in row:
            if type(one) is not int:
                raise Refusal(400, f"Row {number} of `input` contains {shown(one)}: expected token ids, integers.")
            if not 0 <= one < served.vocabulary:
                raise Refusal(
                    400, f"Token id {shown(one)} is out of vocabulary: expected 0 to {served.vocabulary - 1}."
                )
    if (tokens := sum(map(len, rows))) > served.max_request_tokens:
        raise Refusal(
            413,
            f"The rows of `input` have {tokens} tokens together, the limit of a request is "
            f"{served.max_request_tokens}: send fewer at once, for instance each on its own.",
        )
    return [torch.tensor(row) for row in rows]


def _kind(value: Any) -> str:
    """The kind of a JSON value, for messages."""
    if isinstance(value, list):
        return "a list with text in it"
    names = {dict: "an object", str: "text", bool: "a boolean", type(None): "missing or null"}
    return names.get(type(value), "a number")


def content_type(wanted: Wanted) -> str:
    """The media type of the answer."""
    return "application/octet-stream" if wanted.encoding == "bytes_only" else "application/json"


def content_length(wanted: Wanted, width: int) -> int | None:
    """Bytes of the answer, where they are known before it is encoded."""
    if wanted.encoding != "bytes_only":
        return None
    return sum(map(len, wanted.rows)) * width * wanted.dtype.itemsize


def parts(wanted: Wanted, served: Served, states: Sequence[Tensor]) -> Iterator[Any]:
    """The answer piece by piece, so that it never exists twice; `states` are [L, H] per row, in the wanted dtype."""
    if wanted.encoding == "bytes_only":
        for states_LH in states:
            yield from _slices(states_LH, wanted.swapped)
        return
    head = {"id": f"pool-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": served.name}
    yield (json.dumps(head)[:-1] + ', "data": [').encode()
    for number, states_LH in enumerate(states):
        yield f'{", " * bool(number)}{{"index": {number}, "object": "pooling", "data": '.encode()
        yield from _as_text(states_LH, wanted) if wanted.encoding == "base64" else _as_numbers(states_LH)
        yield b"}"
    tokens = sum(map(len, wanted.rows))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    yield f'], "usage": {json.dumps(usage)}}}'.encode()


def _slices(states_LH: Tensor, swapped: bool) -> Iterator[memoryview]:
    numbers = states_LH.flatten().view(torch.uint8).numpy().view(f"u{states_LH.element_size()}")
    for start in range(0, len(numbers), _SLICE):
        piece = numbers[start : start + _SLICE]
        yield (piece.byteswap() if swapped else piece).view("u1").data


def _as_text(states_LH: Tensor, wanted: Wanted) -> Iterator[bytes]:
    yield b'"'
    for piece in _slices(states_LH, wanted.swapped):
        yield base64.b64encode(piece)
    yield b'"'


def _as_numbers(states_LH: Tensor) -> Iterator[bytes]:
    for number, some_nH in enumerate(states_LH.split(max(_SLICE // states_LH.size(1), 1))):
        yield (b", " if number else b"[") + json.dumps(some_nH.tolist())[1:-1].encode()
    yield b"]"
