"""Sends an HTTP request once; the answer has to come whole, in time, of a bounded size, and from where it was sent.

It has the few methods of a `requests.Session` that TRL's client calls. What goes wrong is a [`ServerError`].
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from trl_opsd.run import strict_json
from trl_opsd.run.errors import ServerError

T = TypeVar("T")

MIB = 2**20

_CONNECT_SECONDS = 10.0
"""A machine that is there takes a connection at once, however busy its model is."""
_MOST_BYTES = 16 * MIB
"""Of an answer that carries no completions; the longest, the configuration of a server, has about 0.1 MiB."""
_PLAIN = ("", "identity")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered, with the names that `requests.Response` gives it."""

    asked: str
    """Who was asked for what, as the beginning of a message."""
    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        """As text, whatever it is."""
        return self.content.decode(errors="replace")

    def json(self) -> dict[str, Any]:
        """The JSON object in it.

        Raises:
            ServerError: It is something else.
        """
        try:
            found = strict_json.loads(self.content)
        except ValueError as error:
            raise ServerError(f"{self.asked} did not answer in JSON ({error}): {self.text[:200]!r}") from error
        if not isinstance(found, dict):
            raise ServerError(f"{self.asked} answered a {type(found).__name__}, expected an object: {self.text[:200]}")
        return found


class BoundedSession:
    """Asks with a deadline that counts from the first byte sent to the last one received, however they drip.

    Args:
        deadline (`float`):
            Seconds for a whole request: finding the host, connecting, sending, headers and body.
        in_time (`str`):
            What the deadline comes from, for the message.
        trust_env (`bool`):
            Whether proxies and passwords are taken from the environment. A proxy is held to the same limits.
    """

    def __init__(self, deadline: float, in_time: str, trust_env: bool) -> None:
        self._deadline, self._in_time, self._trust_env = deadline, in_time, trust_env
        self._loop = asyncio.new_event_loop()  # of its own: a notebook's is running already
        threading.Thread(target=self._loop.run_forever, name="trl_opsd server client", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def get(self, url: str, **options: Any) -> Answer:
        """As [`request`], with GET."""
        return self.request("GET", url, **options)

    def post(self, url: str, **options: Any) -> Answer:
        """As [`request`], with POST."""
        return self.request("POST", url, **options)

    def request(
        self, method: str, url: str, *, seconds: float | None = None, most_bytes: int = _MOST_BYTES, **options: Any
    ) -> Answer:
        """Asks once.

        Args:
            method (`str`):
                Of HTTP.
            url (`str`):
                What is asked for. Nothing is sent to any other address.
            seconds (`float`, *optional*):
                Another deadline than the session's.
            most_bytes (`int`, *optional*):
                The longest answer that is read.
            **options (`Any`):
                `json` or `params`.

        Raises:
            ServerError: There is no answer in time, it is too long, compressed or from elsewhere. Any status is one.
        """
        asked, within = f"The vLLM server, asked for {url},", seconds or self._deadline
        try:
            return self._run(self._ask(asked, method, url, within, most_bytes, options))
        except TimeoutError as error:
            why = "" if seconds else self._in_time
            raise ServerError(f"{asked} did not answer within {within:g} seconds{why}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServerError(f"{asked} failed: {type(error).__name__}: {error}. See its log.") from error

    async def _ask(
        self, asked: str, method: str, url: str, within: float, most_bytes: int, options: dict[str, Any]
    ) -> Answer:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(within, _CONNECT_SECONDS))
        # A connection that was kept may be closed by the server just when it is used again.
        alone = aiohttp.TCPConnector(force_close=True)
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        async with (
            asyncio.timeout(within),
            aiohttp.ClientSession(
                timeout=limits, connector=alone, trust_env=self._trust_env, auto_decompress=False, headers=headers
            ) as session,
            session.request(method, url, allow_redirects=False, **options) as response,
        ):
            _check_head(asked, response)
            return Answer(asked, response.status, await _whole(asked, response, most_bytes))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for it; whoever is interrupted meanwhile takes it along."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


def _check_head(asked: str, response: aiohttp.ClientResponse) -> None:
    if 300 <= response.status < 400:
        raise ServerError(
            f"{asked} answered {response.status}, which sends us to {response.headers.get('Location', 'nowhere')!r}: "
            "prompts go where you say only. If that is the server, set `vllm_server_base_url` to it."
        )
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _PLAIN:
        raise ServerError(
            f"{asked} compressed its answer ({encoding!r}), expected plain bytes, as it was asked for: switch that off "
            "in the server, or in what stands before it."
        )


async def _whole(asked: str, response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise ServerError(
                f"{asked} answered more than {most_bytes / MIB:.0f} MiB, the most that what it was asked for can take: "
                "no vLLM server does that, see who listens there."
            )
    return b"".join(parts)
