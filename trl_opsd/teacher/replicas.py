"""The servers of one teacher, by vLLM's pooling API: the least busy scores the next row, one that fails is dropped.

Requests hold token ids, never text. A row is one request, and is sent again to another server where one is slow or
fails, since scoring it changes nothing.

L tokens of a row · M states of an answer · H hidden width
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from trl_opsd._compat.server import pydantic
from trl_opsd.errors import ServerError
from trl_opsd.http.client import MIB, Background, Count, HTTPClient, Response, Schema, ServerKind, warn_in_main
from trl_opsd.http.urls import TEACHER_TOKEN
from trl_opsd.teacher.checkpoint_head import FinalNorm

START = 'vllm serve TEACHER --runner pooling --pooler-config \'{"task": "token_embed"}\''
"""How to start a server, for messages."""

_ABOVE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest excess of the root mean square of the norm's input over 1 that rounding explains."""
_BELOW = 0.9
"""Least median of it: a norm's epsilon lowers it where the residual stream is tiny. Measured 0.9976."""
_SAME = 0.1
"""Relative distance of two states of one token that neither half precision nor other kernels reach."""


class WrongStatesError(ServerError):
    """A server answered, but not with the teacher's states; it cannot be trusted with other rows either."""


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
        """The states of a row, [L, H], in the memory of the answer; raises `WrongStatesError` for others."""
        # Each number is checked, in about 1 ns. `asked` is the beginning of messages.
        row_bytes = self.width * dtype.itemsize
        if len(content) % row_bytes or len(content) < min(tokens, 2) * row_bytes:
            last = (
                f" Was only the last token pooled? Start the server with `{START}`."
                if len(content) <= row_bytes
                else ""
            )
            raise WrongStatesError(
                f"{asked} returned {len(content)} bytes for {tokens} tokens, expected {tokens * row_bytes}: {tokens} "
                f"states of {self.width} numbers in {word(dtype)}.{last} It has to serve {self.path!r}."
            )
        states_MH = torch.frombuffer(content, dtype=dtype).view(-1, self.width)
        # More states than tokens are accepted where the surplus repeats the row's beginning.
        if len(states_MH) < tokens or not _repeats(states_MH[:-tokens], states_MH[-tokens:]):
            raise WrongStatesError(
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
            raise WrongStatesError(
                f"{asked} returned NaN or infinite states at {len(places)} of {len(states_LH)} tokens, the first at "
                f"{places[0]}: check its weights and dtype; start it with the checkpoint's `--dtype`."
            )
        if self.norm is None or (highest <= 1 + _ABOVE[states_LH.dtype] and median >= _BELOW):
            return
        # A pooler's default normalisation is the likeliest cause, and has its own remedy.
        if ((states_LH.float().norm(dim=-1) - 1).abs() < 1e-2).all():
            raise WrongStatesError(
                f"{asked} returned states normalised to length 1, although the request sets `use_activation: false`: "
                "turn off normalisation in the server, or use vLLM 0.31 or 0.32."
            )
        raise WrongStatesError(
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


def word(dtype: torch.dtype) -> str:
    """The name of a dtype in options and requests."""
    return str(dtype).removeprefix("torch.")


T = TypeVar("T")

KIND = ServerKind(
    name="teacher",
    subject="The teacher's server",
    address="`teacher_server_url`",
    timeout="teacher_server_timeout",
    start=f"with `{START}`",
    token=TEACHER_TOKEN,
    health_seconds=10.0,
)

_ROWS = 32
"""Maximum rows of one process in flight per server, which batches them."""
_FAILURES = 3
"""Consecutive failures after which a server is dropped; a connection may break once."""
_SECONDS = 10.0
"""After this, or four times the slowest row so far, a row is also sent to another server that has room."""
_ZEROED = 1e-6
"""Relative distance of the states of two tokens below which the weights must be zero, however small embeddings are."""
_PROBE_SECONDS = 30.0
"""Minimum deadline for a server's first two rows, which are short."""
_PAUSE = 1.0
"""Seconds before a busy server, or one whose connection broke, gets another request, unless it sends `Retry-After`."""
_MAX_PAUSE = 60.0
"""Upper bound of a server's `Retry-After`."""


class BusyError(ServerError):
    """A server accepts no more work, also because of other runs, until `seconds` have passed."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class _Model(Schema):
    id: str
    """The name that requests must contain."""
    root: str | None = None
    """The path or model id that was loaded."""
    max_model_len: Count | None = None
    """Maximum tokens of a request; `None` where there is no limit."""


class _Models(Schema):
    data: Annotated[list[_Model], pydantic.Field(min_length=1)]
    """Of several the first, as the others are adapters on it."""


class Replica:
    """One server, with what is known of its load and failures."""

    def __init__(self, url: str, background: Background) -> None:
        self.url = url
        self.rows = self.failures = 0  # rows in flight; failures since the last answer
        self.failed_at = self.free_at = 0.0  # `monotonic` times: last counted failure, next allowed request
        self.last_error = ""
        self.model = _Model(id="")
        self._http = HTTPClient(KIND, url, KIND.health_seconds, background=background)

    async def connect(self, seconds: float) -> None:
        """Waits until the server is up, and reads which model it serves; a `ValueError` if it is not up in time."""
        await self._http.until_up(seconds)
        response = await self._http.request("GET", "/v1/models")
        _check_status(response)
        self.model = response.parse(_Models).data[0]

    async def states(self, ids: Sequence[int], expected: Expected, dtype: torch.dtype, seconds: float) -> Tensor:
        """The last hidden states of a row, [L, H], of token ids in the teacher's vocabulary."""
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
        response = await self._http.request("POST", "/pooling", json=body, max_bytes=limit, seconds=seconds)
        _check_status(response)
        # In a thread, because checking a long row would block the other requests of this loop.
        return await asyncio.to_thread(expected.states, response.request, response.content, len(ids), dtype)


def _check_status(response: Response) -> None:
    """Raises unless a request succeeded, with what the status means."""
    status, text = response.status, response.text[:500]
    if status in (429, 503):
        # A `Retry-After` may also be a date, which differing clocks cannot compare.
        said = float(response.retry_after) if response.retry_after.isdecimal() else 0.0
        pause = min(max(said, _PAUSE), _MAX_PAUSE)
        raise BusyError(f"{response.request} returned {status} (busy): {text!r}", pause)
    hint = " See its log."
    if status == 404 and "does not exist" not in text:
        hint = f" It has no such route: it generates, or is not a vLLM server; start it with `{START}`."
    elif "task" in text and status == 400:
        hint = f" It was started for another task: start it with `{START}`."
    response.check_status(hint)


class Replicas:
    """All servers of one teacher, whose requests run in a background thread.

    `deadline`: seconds per row over all attempts. `timeout`: seconds to wait for servers that are not up yet, and again
    for their first rows.
    """

    def __init__(self, urls: Sequence[str], deadline: float, timeout: float) -> None:
        self._deadline, self._timeout = deadline, max(timeout, _PROBE_SECONDS)
        self._background = Background()
        self._live = [Replica(url, self._background) for url in urls]
        self._dropped: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._longest = 0.0
        self._background.run(_all([one.connect(timeout) for one in self._live]))
        model = self._live[0].model
        self.source = model.root or model.id  # the path or model id, as the first server reports it
        contexts = [one.model.max_model_len for one in self._live]
        self.context = min((one for one in contexts if one is not None), default=None)
        self._expected: Expected
        self.dtype: torch.dtype

    def prove(self, expected: Expected, vocabulary: int) -> Tensor:
        """Compares what the servers return for two short rows; returns the states of the first, [L, H], float32."""
        self._expected = expected
        # An id outside the vocabulary is not tried: where the tokenizer has more ids than the model, vLLM accepts it.
        spread = [place * (vocabulary - 1) // 7 for place in range(8)]  # up to the last id
        # The second row differs in its last token only, which no earlier state may depend on.
        rows = [spread, [*spread[:-1], spread[0]]]
        until = monotonic() + self._timeout
        read = self._background.run(_all([_all([self._first(one, row, until) for row in rows]) for one in self._live]))
        for replica, (one, other) in zip(self._live, read, strict=True):
            self._compare(replica, one, other, read[0][0])
        self.dtype = served_dtype(read[0][0])
        return read[0][0]

    async def _first(self, replica: Replica, row: Sequence[int], until: float) -> Tensor:
        """A row from one server, which may be busy first, until a deadline."""
        while True:
            try:
                return await replica.states(row, self._expected, torch.float32, until - monotonic())
            except BusyError as error:
                if monotonic() + error.seconds >= until:
                    raise
                await asyncio.sleep(error.seconds)
            except ServerError as error:
                if not isinstance(error.__cause__, TimeoutError):
                    raise
                raise ServerError(
                    f"The teacher's server at {replica.url} is up, but did not score a row of {len(row)} tokens within "
                    f"{self._timeout:g} seconds: see its log, and raise `teacher_server_timeout` if it just needs more "
                    "time."
                ) from error

    def _compare(self, replica: Replica, one: Tensor, other: Tensor, first: Tensor) -> None:
        if not are_same(one[:-1], other[:-1]):
            raise WrongStatesError(
                f"The teacher's server at {replica.url} returns states that depend on later tokens (they move by "
                f"{distance(one[:-1], other[:-1]):.2g} of their length): its attention is bidirectional, as in "
                "embedding models; serve the causal language model itself."
            )
        if distance(one[-1:], other[-1:]) < _ZEROED:
            raise WrongStatesError(
                f"The teacher's server at {replica.url} returns the same state for different tokens: its weights are "
                "zeroed or were not loaded; restart it."
            )
        if served_dtype(one) != served_dtype(first) or not are_same(one, first):
            raise WrongStatesError(
                f"The teacher's servers at {self._live[0].url} and {replica.url} return different states for the same "
                f"tokens, {distance(one, first):.2g} times their length apart, in {served_dtype(first)} and "
                f"{served_dtype(one)}: start all with the same checkpoint, revision and `--dtype`."
            )

    def start(self, ids: Sequence[int]) -> Future[Tensor]:
        """Starts to score a row of L token ids; the future has its states, [L, H], or a `ServerError`."""
        return self._background.start(self._states(ids, monotonic() + self._deadline))

    async def _states(self, ids: Sequence[int], until: float) -> Tensor:
        try:
            async with asyncio.timeout(until - monotonic()):
                return await self._fastest(ids)
        except TimeoutError:
            errors = "\n".join(f"  {one.url}: {one.last_error or 'no response'}" for one in self._live)
            raise ServerError(
                f"None of the teacher's servers scored a row of {len(ids)} tokens within {self._deadline:g} seconds "
                f"(from `ddp_timeout`): see their logs, and raise `ddp_timeout` if they just need more time.\n{errors}"
            ) from None

    async def _fastest(self, ids: Sequence[int]) -> Tensor:
        """The first answer of any of the servers that got the row; a slow server makes another get it too."""
        sent: dict[asyncio.Task[Tensor], tuple[Replica, float]] = {}
        try:
            while True:
                replica = await self._least_busy(without=[one for one, _ in sent.values()])
                if replica is not None:
                    replica.rows += 1
                    sent[asyncio.create_task(self._score(replica, ids))] = replica, monotonic()
                patience = max(_SECONDS, 4 * self._longest)
                done, _ = await asyncio.wait(sent, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    replica, began = sent.pop(task)
                    self._release(replica)
                    if isinstance(error := task.exception(), ServerError):
                        self._count_failure(replica, error, began)
                    elif replica in self._live:  # a dropped server's other answers may be wrong too
                        slow = ServerError(f"It was slow: after {patience:g} seconds, another was faster.")
                        for other, (late, since) in sent.items():
                            if not other.done() and since < began:
                                self._count_failure(late, slow, since)
                        return task.result()
        finally:
            for task, (replica, _) in sent.items():
                task.cancel()
                self._release(replica)

    async def _least_busy(self, without: Collection[Replica]) -> Replica | None:
        """A server with room, other than those; waits only if there are no others."""
        while self._live:
            # Taken before the search: an event set meanwhile must not be missed.
            changed, now = self._changed, monotonic()
            others = [one for one in self._live if one.rows < _ROWS and one not in without]
            if room := [one for one in others if one.free_at <= now]:
                return min(room, key=lambda one: one.rows)
            if without:
                return None
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min((one.free_at - now for one in others), default=None))
        if without:
            return None
        reasons = "\n".join(f"  {url}: {why}" for url, why in self._dropped.items())
        raise ServerError(f"All of the teacher's servers have failed:\n{reasons}")

    async def _score(self, replica: Replica, ids: Sequence[int]) -> Tensor:
        began = monotonic()
        states = await replica.states(ids, self._expected, self.dtype, self._deadline / _FAILURES)
        replica.failures, self._longest = 0, max(self._longest, monotonic() - began)
        return states

    def _count_failure(self, replica: Replica, error: ServerError, began: float) -> None:
        """Pauses a server, and drops it if its answer is wrong or it failed several times. To be busy is no failure."""
        replica.last_error, replica.free_at = str(error), monotonic() + _PAUSE
        if isinstance(error, BusyError):
            replica.free_at = monotonic() + error.seconds
        elif began >= replica.failed_at:  # requests in flight at a failure fail with it, and count once
            replica.failures, replica.failed_at = replica.failures + 1, monotonic()
        if replica in self._live and (isinstance(error, WrongStatesError) or replica.failures >= _FAILURES):
            self._live.remove(replica)
            self._dropped[replica.url] = str(error)
            if self._live:
                left = ", ".join(one.url for one in self._live)
                warn_in_main(f"The teacher's server at {replica.url} is no longer used; its rows go to {left}. {error}")
            self._wake()

    def _release(self, replica: Replica) -> None:
        replica.rows -= 1
        self._wake()

    def _wake(self) -> None:
        # A new event each time, so that waiters wake once per change.
        self._changed.set()
        self._changed = asyncio.Event()


async def _all(coroutines: Sequence[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*coroutines)
