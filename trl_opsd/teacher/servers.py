"""The server of a teacher: what it offers, and one request per row of token ids, sent again where that may help."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.http import (
    BusyError,
    Count,
    HTTPClient,
    Response,
    Schema,
    ServerKind,
    WrongAnswerError,
    at,
    warn_in_main,
)
from trl_opsd._compat.urls import TEACHER_TOKEN
from trl_opsd.errors import ServerError
from trl_opsd.teacher.answers import POOLING, SCORING, Answers, Row

T = TypeVar("T")

KIND = ServerKind(
    name="teacher's server",
    address="`teacher_server_url`",
    timeout="teacher_server_timeout",
    start=f"with `{POOLING}`",
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
"""Minimum deadline for a server's first rows, which are short."""
_TOO_MANY = 1_000_000
"""Tokens that no server tells: it answers how many it does."""
_CANNOT = (400, 403, 404, 405, 422, 501)
"""Statuses by which a server says that it does not offer something; others may be those of the moment."""


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


class _Scores(Schema):
    prompt_token_id_logprobs: str | None = None


class _Limits(Schema):
    """What SGLang takes, by its context and its memory."""

    max_req_input_len: Count


class _Detokenized(Schema):
    prompt: str | None = None
    text: str | None = None


class TeacherServer(HTTPClient):
    """The server of a teacher, and the model that it serves.

    `deadline`: seconds per row over all attempts. `timeout`: seconds to wait until it is up, and again for its first
    rows; a later row that takes longer is warned of, once. A `ValueError` if it is not up in time.
    """

    api = "vLLM (pooling)"
    """Its kind, for messages."""
    is_proved = False
    """Whether its first rows were right: until then requests have `timeout`."""

    def __init__(self, url: str, deadline: float, timeout: float) -> None:
        super().__init__(KIND, url, KIND.health_seconds)
        self._row_seconds, self._start_seconds = deadline, max(timeout, _PROBE_SECONDS)
        self._has_warned = False
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.wait_until_up(timeout)
        self.model = self.get("/v1/models").parse(_Model)
        self.name = self.model.root or self.model.id
        """The model that it reports."""
        self.context = self.model.max_model_len and self.model.max_model_len + 1  # the last is not sent for states
        """Maximum tokens of a row; `None` where there is no limit."""
        self.limits: dict[str, int | None] = {"states": None}
        """The largest K of each of the targets that it offers; `None` where it has none."""

    def start(self, answers: Answers, row: Row) -> Future[Tensor]:
        """Starts to score a row; the future has the answer, [n, W], or a `ServerError`."""

        async def ask(seconds: float) -> Tensor:
            path, body, most = answers.request(row, self.model.id)
            response = await self.request("POST", path, json=body, max_bytes=most, seconds=seconds)
            response.check_status(f" See its log; it is started with `{answers.start}`.")
            try:  # in a thread, because reading a long row would block the other requests of this loop
                return await asyncio.to_thread(answers.read, response, row)
            except ServerError:
                raise
            except Exception as error:  # whatever can be wrong with it
                raise WrongAnswerError(
                    f"{response.request} returned {error!s:.200}, which is no answer: start it with "
                    f"`{answers.start}`, for this checkpoint, and see its log."
                ) from error

        return self.begin(self._answer(ask, f"scored a row of {len(row.ids)} tokens"))

    async def _answer(self, ask: Callable[[float], Awaitable[T]], what: str) -> T:
        """What `ask` returns, which gets the seconds of an attempt; asking twice must change nothing.

        A `ServerError` if every attempt fails, or none ends in time; it says that the server has not done `what`.
        """
        seconds, origin, left, said = self._start_seconds, KIND.timeout, 1, ""
        if self.is_proved:
            seconds, origin, left = self._row_seconds, "ddp_timeout", ATTEMPTS
        each = seconds / left
        try:
            async with asyncio.timeout(seconds), self._room:
                while True:
                    alarm = asyncio.get_running_loop().call_later(self._start_seconds, self._warn_of_delay, each)
                    try:
                        return await ask(each)
                    except WrongAnswerError:
                        raise
                    except BusyError as error:  # which is no failure
                        said = str(error)
                    except ServerError as error:
                        said, left = str(error), left - 1
                        if not left:
                            raise
                    finally:
                        alarm.cancel()
                    await asyncio.sleep(PAUSE)
        except TimeoutError:
            raise ServerError(
                f"The {KIND.name} at {self.url} has not {what} within {seconds:g} seconds (from `{origin}`): see its "
                f"log, and raise `{origin}` if it just needs more time. {said}"
            ) from None

    def _warn_of_delay(self, seconds: float) -> None:
        if self.is_proved and not self._has_warned:
            self._has_warned = True
            warn_in_main(
                f"The {KIND.name} at {self.url} has not answered a request within {self._start_seconds:g} seconds; "
                f"waiting up to {seconds:g} (from `ddp_timeout`): see its log."
            )

    # ---- What it offers -----------------------------------------------------------------------------------------

    def look(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Finds out what it offers, and compares its tokenizer: a `ValueError` if it is another than the student's."""
        self.run(self._answer(lambda seconds: self._look(tokenizer, seconds), "reported what it offers"))

    async def _look(self, tokenizer: PreTrainedTokenizerBase, seconds: float) -> None:
        async def asked(path: str, body: Any = None) -> Response:
            method, given = ("GET", {}) if body is None else ("POST", {"json": body})
            answer = await self.request(method, path, seconds=seconds, **given)
            # Another status is not one of a server that does not offer this, but could not answer now.
            return answer if answer.status in _CANNOT else answer.check_status()

        if self.model.owned_by == "sglang":  # which scores one list of tokens for all positions of a row
            self.api, self.limits = "SGLang", {"teacher_top_k": None}
            info = (await asked("/server_info")).parse(_Limits)
            self.context = info.max_req_input_len - 1  # it refuses a row of this length
        else:
            model = self.model.id
            many = {"model": model, "prompt": [0, 1], "max_tokens": 1, "prompt_logprobs": _TOO_MANY}
            found = await asked("/v1/completions", many)
            if found.status in (404, 405, 501):  # it does not generate
                return
            allowed = re.search(r"max allowed: (\d+)", found.text)
            if allowed is None:
                raise ValueError(
                    f"{found.request} did not report its maximum of log-probabilities ({found.status}: "
                    f"{found.text[:200]}): expected a vLLM or SGLang server; start one with `{SCORING}`."
                )
            self.api, self.limits = "vLLM", {"teacher_top_k": int(allowed[1])}
            some = {"prompt_logprob_token_ids": [[0]], "prompt_logprob_start": 0, "max_tokens": 1}
            body = {"model": model, "token_ids": [0, 1], "sampling_params": some}
            answer = await asked("/inference/v1/generate", body)
            if answer.status == 200 and answer.parse(_Scores).prompt_token_id_logprobs is not None:
                self.limits["student_top_k"] = int(allowed[1])
            self.context = self.model.max_model_len and self.model.max_model_len - 1  # a token is generated after it
        special = {*tokenizer.all_special_ids}  # which some servers leave out
        ids = [one for one in range(0, len(tokenizer), max(1, len(tokenizer) // 16)) if one not in special]
        answer = await asked("/detokenize", {"model": self.model.id, "tokens": ids})
        if answer.status != 200:
            warn_in_main(
                f"{answer.request} returned {answer.status}, so that the tokenizer of the teacher's server is not "
                "compared: make sure that it is the student's."
            )
            return
        text = answer.parse(_Detokenized)
        theirs, ours = text.prompt or text.text or "", tokenizer.decode(ids)
        if "".join(theirs.split()) != "".join(ours.split()):
            raise ValueError(
                f"The teacher's server at {self.url} has another tokenizer: the ids {ids} are {theirs!r} to it and "
                f"{ours!r} here. A server that returns probabilities of tokens needs the student's tokenizer: load "
                "this teacher in the trainer instead, with `cross_tokenizer='bytes'` (docs/tokenizers.md)."
            )
