"""The HTTP side: who may send requests, how much, and how answers are sent; it knows no model.

An authorised client can slow others down, but neither read what they sent nor run anything but the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from trl_opsd._compat.server import web
from trl_opsd.http.urls import TEACHER_TOKEN, is_loopback
from trl_opsd.teacher.serve.protocol import Refusal, Served, Wanted, content_length, content_type, parse, parts
from trl_opsd.teacher.serve.reader import Asked, Closed, Full, NoStates, Reader

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
                    403, f"Without a token only loopback is answered; start the server with {TEACHER_TOKEN} set."
                )
            return
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(given), self._token):
            message = f"This server needs its token: set {TEACHER_TOKEN} where the request is made."
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
            raise Refusal(415, "The request is compressed: send it as it is.")
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
    return Refusal(503, "The server ends: ask another one, or later.", {"Connection": "close"})


def _digest(token: str) -> bytes:
    """Hashed to a fixed length, so that the comparison reveals nothing about the token's length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
