"""Sends each HTTP request once, with a deadline and a size limit for the response.

Responses are parsed by pydantic. Every failure is a [`ServerError`].
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Annotated, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import aiohttp
from torch import distributed

from trl_opsd._compat.urls import is_this_machine, token_header
from trl_opsd._compat.values import pydantic
from trl_opsd.errors import ServerError

T = TypeVar("T")
Parsed = TypeVar("Parsed", bound=pydantic.BaseModel)

logger = logging.getLogger(__name__)

MIB = 2**20

_CONNECT_SECONDS = 10.0
"""A running server accepts connections at once, however busy its model is."""
CONCURRENT = 256
"""Concurrent requests of one [`Responses`]: each has a connection, and a process can often open only 1,024 files."""
_MAX_BYTES = 2048 * MIB
"""Limit of a response where a request has none: a token with its log-probability takes about 100 bytes."""

TokenId: TypeAlias = Annotated[int, pydantic.Field(ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, pydantic.Field(gt=0, lt=2**31)]


class Schema(pydantic.BaseModel):
    """A part of a response: types are not coerced, unknown keys are ignored."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True)


def at(key: str, *path: str | int, **default: Any) -> Any:
    """A field of a `Schema` that lies deeper in the response."""
    return pydantic.Field(validation_alias=pydantic.AliasPath(key, *path), **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """A kind of server: its words in messages, and what is known before any was reached."""

    name: str
    """What messages call it, as in "vLLM server"."""
    address: str
    """All options for its address, in words."""
    timeout: str
    """The option with the seconds to wait for it."""
    start: str
    """How to start one, in words."""
    token: str
    """The environment variable with its token."""
    health_seconds: float
    """A server that is up answers health checks within this time, however busy its model is."""


class BusyError(ServerError):
    """A server accepts no more work now, also because of other runs."""


class WrongAnswerError(ServerError):
    """A server returned something other than the request's answer; others cannot be trusted either."""


@dataclass(frozen=True, slots=True)
class Response:
    """The status and content of a server's answer."""

    request: str
    """The server and the request: how error messages begin."""
    status: int
    content: bytearray
    token: str
    """The environment variable that a refused request may lack."""

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def check_status(self, hint: str = "") -> Response:
        """Itself; a `ServerError` unless the status is 200, a `BusyError` if it says that it is busy."""
        if self.status == 200:
            return self
        if self.status in (401, 403):
            hint = f" Set the environment variable `{self.token}` to the server's key."
        message = f"{self.request} returned {self.status}: {self.text[:500]}{hint}"
        raise (BusyError if self.status in (429, 503) else ServerError)(message)

    def parse(self, schema: type[Parsed]) -> Parsed:
        """The content of a successful response."""
        self.check_status()
        try:
            return schema.model_validate_json(self.content)
        except pydantic.ValidationError as errors:
            error = errors.errors(include_url=False)[0]
            where = ".".join(map(str, error["loc"]))[:80] or "content"
            raise ServerError(f"{self.request} returned {where}={shown(error['input'])}: {error['msg']}.") from errors


class HTTPClient:
    """Requests to one server, each with a deadline for the whole of it, however steadily the response trickles in.

    `origin` says where the deadline comes from, in messages.
    """

    def __init__(self, kind: ServerKind, url: str, deadline: float, origin: str = "") -> None:
        self.kind, self.url = kind, url
        self._deadline, self._origin = deadline, origin
        self._trust_env = not is_this_machine(urlsplit(url).hostname)  # a proxy cannot reach our loopback
        self._headers = {**token_header(kind.token), "Accept-Encoding": "identity", "Connection": "close"}
        # A loop of its own, since in a notebook the current one is already running, in a thread that ends with the
        # client and does not keep the program alive.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="trl_opsd server client", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; cancelling the result cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; an interrupt cancels it."""
        future = self.begin(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def get(self, path: str, **options: Any) -> Response:
        """As [`request`], with GET, and waits for the response."""
        return self.run(self.request("GET", path, **options))

    def post(self, path: str, **options: Any) -> Response:
        """As [`request`], with POST, and waits for the response."""
        return self.run(self.request("POST", path, **options))

    def post_each(self, path: str, bodies: Sequence[Any], read: Callable[[int, Response], T]) -> Responses[T]:
        """Sends one POST per JSON body, whose response `read` parses; without a body the response is empty."""
        turn = asyncio.Semaphore(CONCURRENT)

        async def post(body: Any) -> Response:
            if body is None:
                return Response("", 200, bytearray(), "")
            async with turn:
                return await self.request("POST", path, json=body)

        return Responses([self.begin(post(body)) for body in bodies], read)

    def wait_until_up(self, seconds: float) -> None:
        """Waits until `/health` is 200; a `ValueError` if it is not in time."""
        kind, began, has_warned = self.kind, monotonic(), False
        while True:
            try:
                status = self.get("/health", seconds=kind.health_seconds).status
                if status == 200:
                    return
                reason = f"/health returned {status}, expected 200"
            except ServerError as error:
                reason = str(error)
            if monotonic() - began >= seconds:
                raise ValueError(
                    f"No {kind.name} at {self.url} after `{kind.timeout}={seconds:g}` seconds: {reason}. Start "
                    f"one {kind.start}, or correct {kind.address}."
                )
            if not has_warned:
                warn_in_main(f"No {kind.name} at {self.url} yet; waiting up to {seconds:g} seconds.")
                has_warned = True
            sleep(min(2.0, max(seconds, 0.0)))

    async def request(
        self, method: str, path: str, *, seconds: float | None = None, max_bytes: int | None = None, **options: Any
    ) -> Response:
        """Sends one request, with `json` or `params`; returns a response of any status.

        A `ServerError` if it does not end within `seconds`, by default the client's deadline, or has too many bytes.
        """
        # The deadline covers name resolution, connecting, sending, headers and body: aiohttp cancels all of a request.
        # `requests` does not: dripped headers, or a redirect's body, take their time.
        request, within = f"The {self.kind.name} at {self.url}{path}", seconds or self._deadline
        limit, content = max_bytes or _MAX_BYTES, bytearray()
        try:
            async with (
                asyncio.timeout(within),
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(within, _CONNECT_SECONDS)),
                    connector=aiohttp.TCPConnector(force_close=True),  # a server may close a kept one as it is reused
                    trust_env=self._trust_env,
                    auto_decompress=False,  # a small response could expand to gigabytes; a compressed one is an error
                    headers=self._headers,
                ) as session,
                # A redirect is not followed, but returned: it would be sent the token.
                session.request(method, f"{self.url}{path}", allow_redirects=False, **options) as response,
            ):
                async for part in response.content.iter_any():
                    content += part
                    if len(content) > limit:  # counted here: a header may state any length
                        raise ServerError(
                            f"{request} returned more than {limit / MIB:.0f} MiB, the limit for this request: check "
                            "that the expected server is listening there."
                        )
                return Response(request, response.status, content, self.kind.token)
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(f"{request} accepted no connection within {_CONNECT_SECONDS:g} seconds") from None
        except TimeoutError as error:
            origin = "" if seconds else self._origin
            raise ServerError(f"{request} did not respond within {within:g} seconds{origin}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(f"{request} failed ({type(error).__name__}: {error}): see its log") from error


class Responses(Iterator[tuple[int, T]]):
    """The responses to several requests, each with its number, in order of arrival.

    The other requests are cancelled when one has failed, or when this is closed or collected. `read` takes the
    request's number and its response.
    """

    def __init__(self, requests: Sequence[Future[Any]], read: Callable[[int, Any], T]) -> None:
        self._missing = {request: number for number, request in enumerate(requests)}
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()
        self._read = read
        for request in requests:
            request.add_done_callback(self._ended.put)

    def __next__(self) -> tuple[int, T]:
        try:
            ended = self._ended.get() if self._missing else None
            number = self._missing.pop(ended, None) if ended else None
            if ended is None or number is None:  # closed, perhaps while this waited
                raise StopIteration
            return number, self._read(number, ended.result())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels unanswered requests. Any thread may do so, also while another waits for a response."""
        with suppress(KeyError):  # when none is left
            while True:
                self._missing.popitem()[0].cancel()

    __del__ = close


def warn_in_main(message: str) -> None:
    """Warns in the main process; accelerate's logger would need a state, which a teacher used alone lacks."""
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        logger.warning(message)


def shown(value: Any) -> str:
    """A value for a message, cut if long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
