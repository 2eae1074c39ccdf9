"""Requests to a teacher's server in vLLM's pooling protocol: who may send them, how much, and how they are answered.

L tokens of a row · H hidden width
An authorised client can slow others down, but neither read what they sent nor run anything but the model.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import math
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from reprlib import repr as shown
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from trl_opsd._compat import strict_json
from trl_opsd._compat.server import web
from trl_opsd.http.urls import TEACHER_TOKEN, is_loopback
from trl_opsd.teacher.serve.reader import Asked, Closed, Full, NoStates, Reader

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
        raise Refusal(400, f"Field {shown(unknown[0])} is not supported: expected {', '.join(_FIELDS)}.")
    if (name := asked.get("model")) and name != served.name:
        raise Refusal(404, f"The model {shown(name)} does not exist: this server serves {served.name!r}.")
    if asked.get("task", TASK) not in (None, TASK):
        raise Refusal(400, f"Unsupported task: {shown(asked['task'])}. Supported tasks: ({TASK!r},)")
    # vLLM's default normalises states, from which the loss could not be computed.
    if asked.get("use_activation") is not False:
        raise Refusal(400, "Send `use_activation: false`: states are never normalised here.")
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
            "send token ids.",
        )
    rows = given if any(isinstance(one, list) for one in given) else [given]
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise Refusal(400, f"Row {number} of `input` is {_kind(row)}: expected a list of token ids.")
        if not row:
            raise Refusal(400, f"Row {number} of `input` is empty: expected at least one token.")
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
            f"The rows of `input` have {tokens} tokens in total, but a request is limited to "
            f"{served.max_request_tokens}: send fewer rows per request.",
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


logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN = "/health"
"""The path that needs no token, for load balancers."""


class TeacherServer:
    """Answers requests with what a started reader scores."""

    def __init__(self, reader: Reader, served: Served, token: str | None, patience: float = 60.0) -> None:
        self._reader, self._served, self._patience = reader, served, patience
        # Without a token only requests addressed to loopback are answered, so that no web page can use the browser of
        # this machine. `patience` is how long a whole request, and each piece of an answer, may take to be transferred.
        self._token = _digest(token) if token else None
        self.requests = self.refused = 0

    def application(self) -> web.Application:
        """The routes and the middleware."""
        made = web.Application(middlewares=[self._guard], client_max_size=self._served.max_body_bytes)
        made.router.add_get(_OPEN, self._health)
        made.router.add_get("/v1/models", self._models)
        made.router.add_post("/pooling", self._pooling)
        return made

    def runner(self, shutdown_seconds: float) -> web.AppRunner:
        """Runs the application; a request whose client has gone is cancelled."""
        return web.AppRunner(
            self.application(),
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=shutdown_seconds,
        )

    def close(self) -> None:
        """Refuses the requests that were not begun, and all further ones."""
        for asked in self._reader.waiting.close():
            asked.fail(Closed())

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_sender(request)
            answer = await handler(request)
        except Refusal as refusal:
            self.refused += 1
            logger.debug("%s: %s", refusal.status, refusal.message)
            return web.json_response(refusal.body, status=refusal.status, headers=refusal.headers)
        except web.HTTPException as error:
            self.refused += 1
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return web.json_response(Refusal(error.status, error.reason).body, status=error.status, headers=allowed)
        return answer

    def _check_sender(self, request: web.Request) -> None:
        if request.path == _OPEN:
            return
        if self._token is None:
            try:
                # A browser sends the host name of its web page, even where that resolves to loopback (DNS rebinding).
                host = urlsplit(f"//{request.host}").hostname or ""
            except ValueError:
                host = ""
            if not is_loopback(host):
                raise Refusal(
                    403,
                    "Without a token only requests from loopback are accepted; start the server with "
                    f"{TEACHER_TOKEN} set.",
                )
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(given), self._token):
            message = f"This server requires a token: set {TEACHER_TOKEN} on the client."
            raise Refusal(401, message, {"WWW-Authenticate": "Bearer"})

    async def _health(self, request: web.Request) -> web.Response:
        if self._reader.failure is not None or not self._reader.is_alive():
            raise Refusal(503, f"The latest pass failed, {self._reader.failure}.")
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self._served.card())

    async def _pooling(self, request: web.Request) -> web.StreamResponse:
        wanted = parse(await self._body(request), self._served)
        asked = Asked(wanted.rows, wanted.dtype, asyncio.get_running_loop().create_future())
        try:
            self._reader.waiting.join(asked)
        except Full as full:
            raise Refusal(503, f"The server is busy: {full}.", {"Retry-After": str(self._seconds_to_wait())}) from None
        except Closed:
            raise _ends() from None
        try:
            states = await asked.answer
            answer = await self._send(request, wanted, states)
        except NoStates as error:
            raise Refusal(500, f"{error}.") from None
        except Closed:
            raise _ends() from None
        finally:
            self._reader.waiting.leave(asked)
        self.requests += 1
        return answer

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise Refusal(400, "Unsupported Media Type: Only 'application/json' is allowed")
        if "Content-Encoding" in request.headers:
            # A small compressed body could expand without bound.
            raise Refusal(415, "The request is compressed: send it uncompressed.")
        try:
            async with asyncio.timeout(self._patience):
                return await request.read()
        except TimeoutError:
            raise Refusal(408, f"The request did not arrive within {self._patience:g} seconds.") from None

    async def _send(self, request: web.Request, wanted: Wanted, states: list[Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": content_type(wanted)})
        answer.content_length = content_length(wanted, self._served.width)
        try:
            await answer.prepare(request)
            for part in parts(wanted, self._served, states):
                async with asyncio.timeout(self._patience):
                    await answer.write(part)
            async with asyncio.timeout(self._patience):
                await answer.write_eof()
        except (TimeoutError, ConnectionError):
            # The headers were sent, so only a broken connection tells the client that the answer is incomplete.
            if request.transport is not None:
                request.transport.abort()
        return answer

    def _seconds_to_wait(self) -> int:
        """Seconds until about half of the waiting tokens will be scored, from 1 to 60."""
        rate = self._reader.counts.tokens_per_second
        return min(max(math.ceil(self._reader.waiting.tokens / 2 / rate) if rate else 1, 1), 60)


def _ends() -> Refusal:
    return Refusal(503, "The server is shutting down: retry later, or use another one.", {"Connection": "close"})


def _digest(token: str) -> bytes:
    """Hashed to a fixed length, so that the comparison reveals nothing about the token's length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
