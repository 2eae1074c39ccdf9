"""Sends each HTTP request once, with a deadline and a size limit for the answer, and follows no redirects.

It has the few methods of a `requests.Session` that TRL's client calls, and can send several concurrently. Every failure
is a [`ServerError`].
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from trl_opsd._compat import strict_json
from trl_opsd._compat.aiohttp import aiohttp
from trl_opsd.errors import ServerError

T = TypeVar("T")

MIB = 2**20

_CONNECT_SECONDS = 10.0
"""A running server accepts connections at once, however busy its model is."""
_MAX_BYTES = 16 * MIB
"""Limit for answers that state none; the longest, a server's configuration, has about 0.1 MiB."""
_AT_ONCE = 256
"""Concurrent requests of one [`Answers`]: each has a connection, and a process can often open only 1,024 files."""
_PLAIN = ("", "identity")
"""Content encodings that are accepted: none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a server, with the attribute names of `requests.Response`."""

    asked: str
    """The server and the request: how error messages begin."""
    status_code: int
    content: bytearray
    retry_after: str = ""
    """The header of this name: when to retry a busy server."""

    @property
    def text(self) -> str:
        """The content decoded as UTF-8, invalid bytes replaced."""
        return self.content.decode(errors="replace")

    def json(self, kind: type = dict) -> Any:
        """The content as JSON; a `ServerError` unless it is a `kind`, `dict` or `list`."""
        try:
            found = strict_json.loads(self.content)
        except ValueError as error:
            raise ServerError(f"{self.asked} did not answer in JSON ({error}): {self.text[:200]!r}") from error
        if not isinstance(found, kind):
            expected = "an object" if kind is dict else "a list"
            raise ServerError(f"{self.asked} answered a {type(found).__name__}, expected {expected}: {self.text[:200]}")
        return found


class Background:
    """Runs coroutines in a thread that does not keep the program alive.

    The event loop is its own: in a notebook the current one is already running.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="trl_opsd server client", daemon=True).start()
        # The thread ends with its owner.
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; cancelling the result cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; an interrupt cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()


class BoundedSession:
    """An HTTP session with a deadline for the whole request, even if the answer arrives slowly but steadily.

    `server`, `option` (its address) and `origin` (of the deadline) are words for error messages; `trust_env` reads
    proxies, to which the same limits apply, and passwords from the environment. Several sessions may share one
    `background`.
    """

    def __init__(
        self,
        server: str,
        option: str,
        deadline: float,
        origin: str,
        trust_env: bool,
        headers: Mapping[str, str] | None = None,
        background: Background | None = None,
    ) -> None:
        self._server, self._option = server, option
        self._deadline, self._origin, self._trust_env = deadline, origin, trust_env
        self._headers = {**(headers or {}), "Accept-Encoding": "identity", "Connection": "close"}
        self._background = background or Background()

    def get(self, url: str, **options: Any) -> Answer:
        """As [`request`], with GET."""
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Any) -> Answer:
        """As [`request`], with POST."""
        return self.request("POST", url, **options)

    def request(self, method: str, url: str, **options: Any) -> Answer:
        """As [`ask`], and waits for the answer; an interrupt cancels it."""
        return self._background.run(self.ask(method, url, **options))

    def post_each(
        self, url: str, bodies: Sequence[dict[str, Any]], max_bytes: Sequence[int], read: Callable[[int, Answer], T]
    ) -> Answers[T]:
        """Sends one POST per body, as JSON, with its own limit for the answer; `read` parses the [`Answers`]."""
        turn = asyncio.Semaphore(_AT_ONCE)
        asked = [
            self.ask("POST", url, json=body, max_bytes=most, turn=turn)
            for body, most in zip(bodies, max_bytes, strict=True)
        ]
        return Answers([self._background.start(one) for one in asked], read)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        seconds: float | None = None,
        max_bytes: int = _MAX_BYTES,
        turn: AbstractAsyncContextManager[Any] | None = None,
        **options: Any,
    ) -> Answer:
        """Sends one request, with `json` or `params`, to this address only; returns an answer of any status but a
        redirect.

        A `ServerError` if the answer is late, too long or compressed. `turn` is entered before the request's time
        begins.
        """
        # The deadline covers name resolution, connecting, sending, headers and body.
        asked, within = f"{self._server}, asked for {url},", seconds or self._deadline
        try:
            async with turn or nullcontext():
                return await self._ask(asked, method, url, within, max_bytes, options)
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(f"{asked} took no connection within {_CONNECT_SECONDS:g} seconds") from None
        except TimeoutError as error:
            origin = "" if seconds else self._origin
            raise ServerError(f"{asked} did not answer within {within:g} seconds{origin}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(f"{asked} failed, see its log: {type(error).__name__}: {error}") from error

    async def _ask(
        self, asked: str, method: str, url: str, within: float, max_bytes: int, options: dict[str, Any]
    ) -> Answer:
        # aiohttp cancels all of a request. `requests` does not: dripped headers, or a redirect's body, take their time.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(within, _CONNECT_SECONDS))
        # The server may close a kept connection just when it is reused.
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            asyncio.timeout(within),
            aiohttp.ClientSession(
                timeout=limits,
                connector=connector,
                trust_env=self._trust_env,
                auto_decompress=False,  # a small answer could expand to gigabytes
                headers=self._headers,
            ) as session,
            session.request(method, url, allow_redirects=False, **options) as response,
        ):
            _check_head(asked, response, self._option)
            content = await _body(asked, response, max_bytes)
            return Answer(asked, response.status, content, response.headers.get("Retry-After", ""))


class Answers(Iterator[tuple[int, T]]):
    """The answers to several requests, each with its number, in order of arrival.

    The other requests are cancelled when one has failed, or when this is closed or collected. `read` takes the
    request's number and its answer.
    """

    def __init__(self, requests: Sequence[Future[Answer]], read: Callable[[int, Answer], T]) -> None:
        self._missing = {request: number for number, request in enumerate(requests)}
        self._ended: SimpleQueue[Future[Answer]] = SimpleQueue()
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
        """Cancels unanswered requests. Any thread may do so, also while another waits for an answer."""
        with suppress(KeyError):  # when none is left
            while True:
                self._missing.popitem()[0].cancel()

    __del__ = close


def _check_head(asked: str, response: aiohttp.ClientResponse, option: str) -> None:
    if 300 <= response.status < 400:
        raise ServerError(
            f"{asked} answered {response.status}, which redirects to {response.headers.get('Location', 'nowhere')!r}: "
            f"redirects are not followed. If that is the server, set `{option}` to it."
        )
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _PLAIN:
        raise ServerError(
            f"{asked} compressed its answer ({encoding!r}), expected plain bytes, as requested: switch that off in the "
            "server, or in a proxy in front of it."
        )


async def _body(asked: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytearray:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)  # counted here: a header may state any length
        if size > max_bytes:
            raise ServerError(
                f"{asked} answered more than {max_bytes / MIB:.0f} MiB, the limit for this request: no such server "
                "does that, check what is listening there."
            )
    return bytearray().join(parts)
