"""The server of a teacher, by vLLM's pooling API: a row of token ids each, never text, and its states are checked.

L tokens of a row · M states of an answer · H hidden width
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trl_opsd.errors import ServerError
from trl_opsd.http.client import (
    MIB,
    BusyError,
    Count,
    HTTPClient,
    Schema,
    ServerKind,
    WrongAnswerError,
    at,
    warn_in_main,
)
from trl_opsd.http.urls import TEACHER_TOKEN
from trl_opsd.teacher.checkpoint_head import FinalNorm

T = TypeVar("T")

START = 'vllm serve TEACHER --runner pooling --pooler-config \'{"task": "token_embed"}\''
"""How to start a server, for messages."""

KIND = ServerKind(
    name="teacher",
    subject="The teacher's server",
    address="`teacher_server_url`",
    timeout="teacher_server_timeout",
    start=f"with `{START}`",
    token=TEACHER_TOKEN,
    health_seconds=10.0,
)
ATTEMPTS = 3
"""Times that a row is requested at most, if the server is not busy; each has that share of the deadline."""
PAUSE = 1.0
"""Seconds before a request that failed is repeated, unless the server is busy and says how long."""
_AT_ONCE = 32
"""Maximum requests in flight, which the server batches."""
_PROBE_SECONDS = 30.0
"""Minimum deadline for a server's first two rows, which are short."""
_ZEROED = 1e-6
"""Relative distance of the states of two tokens below which the weights must be zero, however small embeddings are."""
_ABOVE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest excess of the root mean square of the norm's input over 1 that rounding explains."""
_BELOW = 0.9
"""Least median of it: a norm's epsilon lowers it where the residual stream is tiny. Measured 0.9976."""
MOST_APART = 0.05
"""Nats between two predictions for the same tokens that neither half precision nor other kernels reach."""
_SAME = 0.1
"""Relative distance of two states of one token that neither half precision nor other kernels reach."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a teacher's states before any was seen."""

    path: str
    """The checkpoint, for messages."""
    width: int
    """H."""
    norm: FinalNorm | None
    """The norm that made the states; `None` if unknown."""

    def states(self, asked: str, content: bytearray, tokens: int, dtype: torch.dtype) -> Tensor:
        """The states of a row, [L, H], in the memory of the answer; raises `WrongAnswerError` for others."""
        # Each number is checked, in about 1 ns. `asked` is the beginning of messages.
        row_bytes = self.width * dtype.itemsize
        if len(content) % row_bytes or len(content) < min(tokens, 2) * row_bytes:
            last = (
                f" Was only the last token pooled? Start the server with `{START}`."
                if len(content) <= row_bytes
                else ""
            )
            raise WrongAnswerError(
                f"{asked} returned {len(content)} bytes for {tokens} tokens, expected {tokens * row_bytes}: {tokens} "
                f"states of {self.width} numbers in {word(dtype)}.{last} It has to serve {self.path!r}."
            )
        states_MH = torch.frombuffer(content, dtype=dtype).view(-1, self.width)
        # More states than tokens are accepted where the surplus repeats the row's beginning.
        if len(states_MH) < tokens or not _repeats(states_MH[:-tokens], states_MH[-tokens:]):
            raise WrongAnswerError(
                f"{asked} returned {len(states_MH)} states for {tokens} tokens: expected one per token; start it with "
                f"`{START}`."
            )
        states_LH = states_MH[-tokens:]
        self._check(asked, states_LH)
        return states_LH

    def _check(self, asked: str, states_LH: Tensor) -> None:
        rms_L = (self.norm or FinalNorm(torch.ones(self.width), torch.zeros(self.width))).rms(states_LH)
        lowest, highest, median = (float(one) for one in (rms_L.min(), rms_L.max(), rms_L.median()))
        if not highest < math.inf and (places := (~states_LH.isfinite().all(-1)).nonzero().flatten().tolist()):
            raise WrongAnswerError(
                f"{asked} returned NaN or infinite states at {len(places)} of {len(states_LH)} tokens, the first at "
                f"{places[0]}: check its weights and dtype; start it with the checkpoint's `--dtype`."
            )
        if self.norm is None or (highest <= 1 + _ABOVE[states_LH.dtype] and median >= _BELOW):
            return
        # A pooler's default normalisation is the likeliest cause, and has its own remedy.
        if ((states_LH.float().norm(dim=-1) - 1).abs() < 1e-2).all():
            raise WrongAnswerError(
                f"{asked} returned states normalised to length 1, although the request sets `use_activation: false`: "
                "turn off normalisation in the server, or use vLLM 0.31 or 0.32."
            )
        raise WrongAnswerError(
            f"{asked} returned states that cannot come from the final norm of {self.path!r}: with its weight divided "
            f"out, their root mean square is {lowest:.3g} to {highest:.3g}, expected 1. It serves another model, "
            f"revision or layer: start it with {self.path!r}, and without anything that changes the states."
        )


def served_dtype(states: Tensor) -> torch.dtype:
    """The dtype that states were computed in, from float32 values: the smallest that loses nothing."""
    halves = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in halves if torch.equal(states.to(dtype).float(), states)), torch.float32)


def distance(one: Tensor, other: Tensor) -> float:
    """Largest distance of two states of a token, relative to their length."""
    return float(((one - other).float().norm(dim=-1) / other.float().norm(dim=-1).clamp(min=1e-9)).max())


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether the same model can have given both for the same tokens."""
    return len(one) == 0 or distance(one, other) < _SAME


def _repeats(extra_KH: Tensor, states_LH: Tensor) -> bool:
    """Whether surplus states are repeated beginnings of the row, as vLLM returns for preempted rows."""
    # vLLM keeps the states of a row that was preempted and computed again from its first token
    # (vllm-project/vllm#55192), so that the last L are the whole row. A new request would be preempted as well.
    at = 0
    for state_H in extra_KH:
        if at == len(states_LH) or not are_same(state_H[None], states_LH[at : at + 1]):
            at = 0
        if not are_same(state_H[None], states_LH[at : at + 1]):
            return False
        at += 1
    return True


def probe_ids(vocabulary: int) -> list[int]:
    """The row that a server is proved by."""
    # An id outside the vocabulary is not tried: where the tokenizer has more ids than the model, vLLM accepts it.
    return [place * (vocabulary - 1) // 7 for place in range(8)]  # up to the last id


def smallest(*limits: int | None) -> int | None:
    """The smallest of the known limits."""
    return min((one for one in limits if one is not None), default=None)


def word(dtype: torch.dtype) -> str:
    """The name of a dtype in options and requests."""
    return str(dtype).removeprefix("torch.")


class _Model(Schema):
    """The first of the models that are listed; the others are adapters on it."""

    id: str = at("data", 0, "id")
    """The name that requests must contain."""
    root: str | None = at("data", 0, "root", default=None)
    """The path or model id that was loaded."""
    owned_by: str | None = at("data", 0, "owned_by", default=None)
    """The kind of server, in its own word."""
    max_model_len: Count | None = at("data", 0, "max_model_len", default=None)
    """Maximum tokens of a request; `None` where there is no limit."""


class ModelServer(HTTPClient):
    """The server of a teacher, and the model that it serves.

    `deadline`: seconds per row over all attempts. `timeout`: seconds to wait until it is up, and again for its first
    rows; a later row that takes longer is warned of, once. A `ValueError` if it is not up in time.
    """

    def __init__(self, url: str, deadline: float, timeout: float) -> None:
        super().__init__(KIND, url, KIND.health_seconds)
        self._row_seconds, self._start_seconds = deadline, max(timeout, _PROBE_SECONDS)
        self._is_proved = self._has_warned = False
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.wait_until_up(timeout)
        self.model = self.get("/v1/models").parse(_Model)
        self.context = self.model.max_model_len

    def warn_of_name(self, path: str, compared: str) -> None:
        """Warns if it reports another name than that of the checkpoint at `path`; `compared` is what is known."""
        served, ours = (self.model.root or self.model.id).rstrip("/"), path.rstrip("/")
        if Path(ours).name.lower() not in served.lower() and Path(served).name.lower() not in ours.lower():
            warn_in_main(
                f"The teacher's server at {self.url} reports that it serves {served!r}, but `teacher_model` is "
                f"{ours!r}: make sure that they are the same checkpoint; {compared}."
            )

    async def answer(self, ask: Callable[[float], Awaitable[T]], what: str) -> T:
        """What `ask` returns, which gets the seconds of an attempt; asking twice must change nothing.

        A `ServerError` if every attempt fails, or none ends in time; it says that the server has not done `what`.
        """
        seconds, origin, attempts = self._start_seconds, KIND.timeout, 1
        if self._is_proved:
            seconds, origin, attempts = self._row_seconds, "ddp_timeout", ATTEMPTS
        failures, said = 0, ""
        try:
            async with asyncio.timeout(seconds), self._room:
                while True:
                    loop = asyncio.get_running_loop()
                    alarm = loop.call_later(self._start_seconds, self._warn_of_delay, seconds / attempts)
                    try:
                        return await ask(seconds / attempts)
                    except WrongAnswerError:
                        raise
                    except BusyError as error:  # which is no failure
                        said, pause = str(error), max(error.seconds, PAUSE)
                    except ServerError as error:
                        said, pause, failures = str(error), PAUSE, failures + 1
                        if failures == attempts:
                            raise
                    finally:
                        alarm.cancel()
                    await asyncio.sleep(pause)
        except TimeoutError:
            raise ServerError(
                f"{KIND.subject} at {self.url} has not {what} within {seconds:g} seconds (from `{origin}`): see its "
                f"log, and raise `{origin}` if it just needs more time. {said}"
            ) from None

    def _warn_of_delay(self, seconds: float) -> None:
        if self._is_proved and not self._has_warned:
            self._has_warned = True
            warn_in_main(
                f"{KIND.subject} at {self.url} has not answered a request within {self._start_seconds:g} seconds; "
                f"waiting up to {seconds:g} (from `ddp_timeout`): see its log."
            )


class StatesServer(ModelServer):
    """A server that returns hidden states."""

    expected: Expected
    dtype: torch.dtype = torch.float32
    """In which it computes; known after `prove`."""
    twice: tuple[Tensor, Tensor]
    """States of the same tokens, by two requests; likewise."""

    def prove(self, expected: Expected, vocabulary: int) -> Tensor:
        """Compares what it returns for two short rows; returns the states of the first, [L, H], float32."""
        self.expected, spread = expected, probe_ids(vocabulary)
        # The second row differs in its last token only, which no earlier state may depend on.
        asked = [self.start(row) for row in (spread, [*spread[:-1], spread[0]])]
        one, other = (each.result() for each in asked)
        if not are_same(one[:-1], other[:-1]):
            raise WrongAnswerError(
                f"The teacher's server at {self.url} returns states that depend on later tokens (they move by "
                f"{distance(one[:-1], other[:-1]):.2g} of their length): its attention is bidirectional, as in "
                "embedding models; serve the causal language model itself."
            )
        if distance(one[-1:], other[-1:]) < _ZEROED:
            raise WrongAnswerError(
                f"The teacher's server at {self.url} returns the same state for different tokens: its weights are "
                "zeroed or were not loaded; restart it."
            )
        self.dtype, self.twice, self._is_proved = served_dtype(one), (one[:-1], other[:-1]), True
        return one

    def start(self, ids: Sequence[int]) -> Future[Tensor]:
        """Starts to score a row of L token ids; the future has its states, [L, H], or a `ServerError`."""
        answer = self.answer(lambda seconds: self._states(ids, seconds), f"scored a row of {len(ids)} tokens")
        return self._background.start(answer)

    async def _states(self, ids: Sequence[int], seconds: float) -> Tensor:
        expected, dtype = self.expected, self.dtype
        body: dict[str, Any] = {
            "model": self.model.id,
            "input": list(ids),
            "task": "token_embed",
            "use_activation": False,  # else they are normalised to length 1
            "encoding_format": "bytes_only",  # "bytes" describes them in a header, which gets too long
            "embed_dtype": word(dtype),
            "endianness": sys.byteorder,
        }
        limit = 4 * len(ids) * expected.width * dtype.itemsize + MIB  # vLLM answers preempted rows more than once
        response = await self.request("POST", "/pooling", json=body, max_bytes=limit, seconds=seconds)
        hint = " See its log."
        if response.status == 404 and "does not exist" not in response.text:
            hint = f" It has no such route: it generates, or is not a vLLM server; start it with `{START}`."
        elif response.status == 400 and "task" in response.text:
            hint = f" It was started for another task: start it with `{START}`."
        response.check_status(hint)
        # In a thread, because checking a long row would block the other requests of this loop.
        return await asyncio.to_thread(expected.states, response.request, response.content, len(ids), dtype)
