"""Sends each HTTP request once, with a deadline and a size limit for the answer, and follows no redirects.

It has the few methods of a `requests.Session` that TRL's client calls. Every failure is a [`ServerError`].
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import weakref
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from trl_opsd.run import strict_json
from trl_opsd.run.errors import ServerError

T = TypeVar("T")

MIB = 2**20

_CONNECT_SECONDS = 10.0
"""A running server accepts connections at once, however busy its model is."""
_MAX_BYTES = 16 * MIB
"""Limit for answers that state none; the longest, a server's configuration, has about 0.1 MiB."""
_PLAIN = ("", "identity")
"""Content encodings that are accepted: none."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered, with the attribute names of `requests.Response`."""

    asked: str
    """The server and the request, as the beginning of an error message."""
    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        """The content decoded as UTF-8, invalid bytes replaced."""
        return self.content.decode(errors="replace")

    def json(self) -> dict[str, Any]:
        """The content as a JSON object.

        Raises:
            ServerError: It is not one.
        """
        try:
            found = strict_json.loads(self.content)
        except ValueError as error:
            raise ServerError(f"{self.asked} did not answer in JSON ({error}): {self.text[:200]!r}") from error
        if not isinstance(found, dict):
            raise ServerError(f"{self.asked} answered a {type(found).__name__}, expected an object: {self.text[:200]}")
        return found


class Background:
    """Runs coroutines in a thread that does not keep the program alive.

    The event loop is its own: in a notebook the current one is already running.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="trl_opsd server client", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine; to cancel the result cancels it."""
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

    Args:
        server (`str`):
            What answers, as an error message begins.
        option (`str`):
            The option with its address, for the message about a redirect.
        deadline (`float`):
            Seconds for a whole request: name resolution, connecting, sending, headers and body.
        origin (`str`):
            Where the deadline comes from, for the error message.
        trust_env (`bool`):
            Whether proxies and passwords are taken from the environment. The same limits apply to a proxy.
        headers (`Mapping[str, str]`, *optional*):
            Sent with each request.
        background ([`Background`], *optional*):
            Where requests run; several sessions may share one.
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

    def request(
        self, method: str, url: str, *, seconds: float | None = None, max_bytes: int = _MAX_BYTES, **options: Any
    ) -> Answer:
        """As [`ask`], and waits for the answer; an interrupt cancels it."""
        return self._background.run(self.ask(method, url, seconds=seconds, max_bytes=max_bytes, **options))

    async def ask(
        self, method: str, url: str, *, seconds: float | None = None, max_bytes: int = _MAX_BYTES, **options: Any
    ) -> Answer:
        """Sends one request.

        Args:
            method (`str`):
                The HTTP method.
            url (`str`):
                The address. Nothing is sent to any other.
            seconds (`float`, *optional*):
                A deadline that replaces the session's.
            max_bytes (`int`, *optional*):
                Limit for the answer.
            **options (`Any`):
                `json` or `params`.

        Raises:
            ServerError: There is no answer in time, or it is too long, compressed or a redirect. An answer with any
                other status is returned.
        """
        asked, within = f"{self._server}, asked for {url},", seconds or self._deadline
        try:
            return await self._ask(asked, method, url, within, max_bytes, options)
        except TimeoutError as error:
            origin = "" if seconds else self._origin
            raise ServerError(f"{asked} did not answer within {within:g} seconds{origin}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(f"{asked} failed, see its log: {type(error).__name__}: {error}") from error

    async def _ask(
        self, asked: str, method: str, url: str, within: float, max_bytes: int, options: dict[str, Any]
    ) -> Answer:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(within, _CONNECT_SECONDS))
        # The server may close a kept connection just when it is reused.
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            asyncio.timeout(within),
            aiohttp.ClientSession(
                timeout=limits,
                connector=connector,
                trust_env=self._trust_env,
                auto_decompress=False,
                headers=self._headers,
            ) as session,
            session.request(method, url, allow_redirects=False, **options) as response,
        ):
            _check_head(asked, response, self._option)
            return Answer(asked, response.status, await _body(asked, response, max_bytes))


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its address; no proxy can reach it."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


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


async def _body(asked: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise ServerError(
                f"{asked} answered more than {max_bytes / MIB:.0f} MiB, the limit for this request: no such server "
                "does that, check what is listening there."
            )
    return b"".join(parts)
