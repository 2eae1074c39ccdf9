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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from reprlib import repr as shown
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from trl_opsd._compat import strict_json
from trl_opsd._compat.server import pydantic, web
from trl_opsd.http.client import Schema, first_error
from trl_opsd.http.urls import TEACHER_TOKEN, is_loopback
from trl_opsd.teacher.serve.reader import Asked, Closed, Full, NoStates, Reader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KINDS = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""vLLM's names of errors, where they differ from HTTP's."""
_HEADERS = ("Allow", "Connection", "Retry-After", "WWW-Authenticate")
"""Headers of errors that are sent."""
_SLICE = 3 << 17
"""Numbers per piece of an answer; divisible by 3, so that base64 can be encoded piece by piece."""


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


class Request(Schema):
    """A request, with vLLM's fields; of those that do not change the answer to token ids any value is accepted."""

    model_config = pydantic.ConfigDict(extra="forbid")

    input: Annotated[list[Annotated[list[int], pydantic.Field(min_length=1), pydantic.FailFast()]], pydantic.FailFast()]
    """Token ids of each row, or of one row."""
    model: str | None = None
    task: Literal["token_embed"] | None = None
    use_activation: bool = True
    """vLLM's default, which normalises states; the loss could not be computed from those."""
    encoding_format: Literal["float", "base64", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"
    add_special_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None
    user: Any = None

    @pydantic.field_validator("input", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        is_one = isinstance(given, list) and not any(isinstance(one, list) for one in given)
        return [given] if is_one else given

    @property
    def dtype(self) -> torch.dtype:
        """Of the answer: as with vLLM, numbers in JSON are not rounded."""
        return torch.float32 if self.encoding_format == "float" else DTYPES[self.embed_dtype]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.input))


def parse(content: bytes, served: Served) -> Request:
    """Validates the body of a request, of which nothing is trusted; raises aiohttp's errors."""
    try:
        asked = Request.model_validate(strict_json.loads(content))
    except pydantic.ValidationError as errors:
        found = first_error(errors)
        hint = " Send token ids, [17, 4] or [[17, 4], [3]]: this server has no tokenizer."
        raise web.HTTPBadRequest(text=f"{found}.{hint if found.startswith('input') else ''}") from None
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"The request is not JSON: {str(error)[:200]}.") from None
    if asked.model and asked.model != served.name:
        known = f"this server has {served.name!r}"
        raise web.HTTPNotFound(text=f"The model {shown(asked.model)} does not exist: {known}.")
    if asked.use_activation:
        never = "states are answered as they are, never normalised"
        raise web.HTTPBadRequest(text=f"Send `use_activation: false`: {never}.")
    for number, row in enumerate(asked.input):
        if len(row) > served.max_model_len:
            raise web.HTTPBadRequest(
                text=f"Row {number} of `input` has {len(row)} tokens, longer than the maximum model length of "
                f"{served.max_model_len}."
            )
        for one in (min(row), max(row)):
            if not 0 <= one < served.vocabulary:
                last = served.vocabulary - 1
                raise web.HTTPBadRequest(text=f"Token id {shown(one)} is out of vocabulary: expected 0 to {last}.")
    if asked.tokens > served.max_request_tokens:
        raise web.HTTPRequestEntityTooLarge(
            served.max_request_tokens,
            asked.tokens,
            text=f"The rows of `input` have {asked.tokens} tokens together, the limit of a request is "
            f"{served.max_request_tokens}: send fewer at once, for instance each on its own.",
        )
    return asked


def parts(asked: Request, served: Served, states: Sequence[Tensor]) -> Iterator[Any]:
    """The answer piece by piece, so that it never exists twice; `states` are [L, H] per row, in the dtype asked for."""
    if asked.encoding_format == "bytes_only":
        for states_LH in states:
            yield from _slices(states_LH, asked)
        return
    head = {"id": f"pool-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": served.name}
    yield (json.dumps(head)[:-1] + ', "data": [').encode()
    for number, states_LH in enumerate(states):
        yield f'{", " * bool(number)}{{"index": {number}, "object": "pooling", "data": '.encode()
        yield from _as_text(states_LH, asked) if asked.encoding_format == "base64" else _as_numbers(states_LH)
        yield b"}"
    usage = {"prompt_tokens": asked.tokens, "total_tokens": asked.tokens, "completion_tokens": 0}
    yield f'], "usage": {json.dumps(usage)}}}'.encode()


def _slices(states_LH: Tensor, asked: Request) -> Iterator[memoryview]:
    swapped = asked.endianness not in ("native", sys.byteorder)
    numbers = states_LH.flatten().view(torch.uint8).numpy().view(f"u{states_LH.element_size()}")
    for start in range(0, len(numbers), _SLICE):
        piece = numbers[start : start + _SLICE]
        yield (piece.byteswap() if swapped else piece).view("u1").data


def _as_text(states_LH: Tensor, asked: Request) -> Iterator[bytes]:
    yield b'"'
    for piece in _slices(states_LH, asked):
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

    def runner(self, shutdown_seconds: float) -> web.AppRunner:
        """Runs the routes; a request whose client has gone is cancelled."""
        routes = web.Application(middlewares=[self._guard], client_max_size=self._served.max_body_bytes)
        routes.router.add_get(_OPEN, self._health)
        routes.router.add_get("/v1/models", self._models)
        routes.router.add_post("/pooling", self._pooling)
        return web.AppRunner(
            routes,
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
            return await handler(request)
        except web.HTTPException as error:
            self.refused += 1
            logger.debug("%s: %s", error.status, error.text)
            # As vLLM formats it.
            kind = _KINDS.get(error.status, HTTPStatus(error.status).phrase)
            body = {"error": {"message": error.text, "type": kind, "param": None, "code": error.status}}
            kept = {name: error.headers[name] for name in _HEADERS if name in error.headers}
            return web.json_response(body, status=error.status, headers=kept)

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
                needed = f"start the server with {TEACHER_TOKEN} set"
                raise web.HTTPForbidden(text=f"Without a token only loopback is answered; {needed}.")
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(given), self._token):
            message = f"This server requires a token: set {TEACHER_TOKEN} on the client."
            raise web.HTTPUnauthorized(text=message, headers={"WWW-Authenticate": "Bearer"})

    async def _health(self, request: web.Request) -> web.Response:
        if self._reader.failure is not None or not self._reader.is_alive():
            raise web.HTTPServiceUnavailable(text=f"The latest pass failed, {self._reader.failure}.")
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self._served.card())

    async def _pooling(self, request: web.Request) -> web.StreamResponse:
        wanted = parse(await self._body(request), self._served)
        rows = [torch.tensor(row) for row in wanted.input]
        asked = Asked(rows, wanted.dtype, asyncio.get_running_loop().create_future())
        try:
            self._reader.waiting.join(asked)
        except Full as full:
            later = {"Retry-After": str(self._seconds_to_wait())}
            raise web.HTTPServiceUnavailable(text=f"The server is busy: {full}.", headers=later) from None
        except Closed:
            raise _ends() from None
        try:
            states = await asked.answer
            answer = await self._send(request, wanted, states)
        except NoStates as error:
            raise web.HTTPInternalServerError(text=f"{error}.") from None
        except Closed:
            raise _ends() from None
        finally:
            self._reader.waiting.leave(asked)
        self.requests += 1
        return answer

    async def _body(self, request: web.Request) -> bytes:
        if request.content_type != "application/json":
            raise web.HTTPBadRequest(text="Unsupported Media Type: Only 'application/json' is allowed")
        if "Content-Encoding" in request.headers:
            # A small compressed body could expand without bound.
            raise web.HTTPUnsupportedMediaType(text="The request is compressed: send it uncompressed.")
        try:
            async with asyncio.timeout(self._patience):
                return await request.read()
        except TimeoutError:
            message = f"The request did not arrive within {self._patience:g} seconds."
            raise web.HTTPRequestTimeout(text=message) from None

    async def _send(self, request: web.Request, wanted: Request, states: list[Any]) -> web.StreamResponse:
        is_bytes = wanted.encoding_format == "bytes_only"
        kind = "application/octet-stream" if is_bytes else "application/json"
        answer = web.StreamResponse(headers={"Content-Type": kind})
        if is_bytes:
            answer.content_length = wanted.tokens * self._served.width * wanted.dtype.itemsize
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


def _ends() -> web.HTTPException:
    closing = {"Connection": "close"}
    return web.HTTPServiceUnavailable(
        text="The server is shutting down: retry later, or use another one.", headers=closing
    )


def _digest(token: str) -> bytes:
    """Hashed to a fixed length, so that the comparison reveals nothing about the token's length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
