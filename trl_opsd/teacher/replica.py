"""The client of one server that returns a teacher's last hidden states, over vLLM's pooling API.

Requests hold token ids, never text. A row is one request.
"""

from __future__ import annotations

import logging
import sys
from asyncio import sleep, to_thread
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed

from trl_opsd.errors import ServerError
from trl_opsd.http.addresses import is_this_machine
from trl_opsd.http.bounded_http import Answer, Background, BoundedSession
from trl_opsd.http.server_tokens import TEACHER_TOKEN, token_header
from trl_opsd.teacher.answered_states import START, Expected

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 10.0
"""Deadline of health and model requests, which a running server answers at once, however busy its model is."""
_BUSY = (429, 503)
"""HTTP statuses of a server that accepts no more work for now."""
BREATH = 1.0
"""Seconds before a busy server, or one whose connection broke, gets another request, unless it sends `Retry-After`."""
_LONGEST_BREATH = 60.0
"""Upper bound of a server's `Retry-After`."""


class BusyError(ServerError):
    """A server accepts no more work, also because of other runs, until `seconds` have passed."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


def say(message: str) -> None:
    """Warns in the main process, without accelerate's logger, whose state a teacher used alone lacks."""
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        logger.warning(message)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server reports about itself."""

    name: str
    """The model name that requests must contain."""
    source: str
    """The path or model id that it loaded."""
    context: int | None
    """Maximum tokens of a request; `None` where there is no limit."""

    @classmethod
    def of(cls, answer: Answer) -> Facts:
        """Parses the answer of `/v1/models`; of several models the first, as the others are adapters on it."""
        try:
            model = answer.json()["data"][0]
            name, source, context = model["id"], model.get("root") or model["id"], model.get("max_model_len")
            if not (isinstance(name, str) and isinstance(source, str)):
                raise TypeError(f"a model named {name!r}")
            return cls(name, source, None if context is None else int(context))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{answer.asked} did not list a model ({type(error).__name__}: {error}), as a vLLM server does: is it "
                f"one, and the right port? It answered {answer.text[:200]!r}."
            ) from error


class Replica:
    """A client of one server (`url` without a path), whose coroutines run in `background`."""

    def __init__(self, url: str, background: Background) -> None:
        self.url = url
        self.busy = self.rows = self.failures = 0  # tokens and rows in flight; failures since the last answer
        self.failed_at = self.free_at = 0.0  # `monotonic` times: last counted failure, next allowed request
        self.said = ""  # its last error
        self._facts: Facts | None = None
        self._session = BoundedSession(
            "The teacher's server",
            "teacher_server_url",
            _HEALTH_SECONDS,
            "",
            trust_env=not is_this_machine(urlsplit(url).hostname),
            headers=token_header(TEACHER_TOKEN),
            background=background,
        )

    @property
    def facts(self) -> Facts:
        """What it reported when it was connected to."""
        assert self._facts is not None, "connected first"
        return self._facts

    async def connect(self, seconds: float) -> None:
        """Waits until the server is up, and asks what it serves; a `ValueError` if it is not up in time."""
        began, has_warned = monotonic(), False
        while why := await self._health_error():
            if monotonic() - began >= seconds:
                raise ValueError(
                    f"No teacher server at {self.url} after `teacher_server_timeout={seconds:g}` seconds: {why}. Start "
                    f"one with `{START}`, or correct `teacher_server_url`."
                )
            if not has_warned:
                say(f"No teacher server at {self.url} yet, waiting for up to {seconds:g} seconds.")
                has_warned = True
            await sleep(min(2.0, max(seconds, 0.0)))
        answer = await self._session.ask("GET", f"{self.url}/v1/models", seconds=_HEALTH_SECONDS)
        _check_status(answer)
        self._facts = Facts.of(answer)

    async def states(self, ids: Sequence[int], expected: Expected, dtype: torch.dtype, seconds: float) -> Tensor:
        """The last hidden states of a row, [L, H], of token ids in the teacher's vocabulary."""
        request: dict[str, Any] = {
            "model": self.facts.name,
            "input": list(ids),
            "task": "token_embed",
            "use_activation": False,  # else they are normalised to length 1
            "encoding_format": "bytes_only",  # "bytes" describes them in a header, which gets too long
            "embed_dtype": str(dtype).removeprefix("torch."),
            "endianness": sys.byteorder,
        }
        most = expected.max_bytes(len(ids), dtype)
        answer = await self._session.ask("POST", f"{self.url}/pooling", json=request, max_bytes=most, seconds=seconds)
        _check_status(answer)
        # In a thread, because checking a long row would block the other requests of this loop.
        return await to_thread(expected.states, answer.asked, answer.content, len(ids), dtype)

    async def _health_error(self) -> str | None:
        try:
            answer = await self._session.ask("GET", f"{self.url}/health", seconds=_HEALTH_SECONDS)
        except ServerError as error:
            return str(error)
        return None if answer.status_code == 200 else f"/health answers {answer.status_code}, not 200"


def _check_status(answer: Answer) -> None:
    """Raises unless a request was answered, with what the status means."""
    status, said = answer.status_code, answer.text[:500]
    if status == 200:
        return
    if status in _BUSY:
        raise BusyError(f"{answer.asked} answered {status}: it is busy. It says: {said!r}", _breath(answer.retry_after))
    if status in (401, 403):
        why = f"it asks for a token: set the environment variable `{TEACHER_TOKEN}` to that of the server."
    elif status == 404 and "does not exist" not in said:
        why = f"it has no such route, as a server that generates, or that is no vLLM server: start it with `{START}`."
    elif "task" in said and status == 400:
        why = f"it was started for another task: start it with `{START}`."
    else:
        why = "see its log."
    raise ServerError(f"{answer.asked} answered {status}: {why} It says: {said!r}")


def _breath(retry_after: str) -> float:
    """Seconds to wait; a `Retry-After` may also be a date, which differing clocks cannot compare."""
    return min(max(float(retry_after), BREATH), _LONGEST_BREATH) if retry_after.isdecimal() else BREATH
