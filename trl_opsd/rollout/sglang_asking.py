"""Requests completions from an SGLang server, all at once or row by row, from any process; knows nothing of weights.

SGLang's server ends if it is sent an empty prompt or an id outside of its vocabulary: prompts are checked before they
come here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from trl_opsd.errors import ServerError
from trl_opsd.http.bounded_http import Answer, Answers, BoundedSession
from trl_opsd.rollout import sglang_answers as answers
from trl_opsd.rollout.engine import Row
from trl_opsd.rollout.sessions import content
from trl_opsd.types import Completion

logger = logging.getLogger(__name__)

_OF_THE_PROTOCOL = ("logprobs", "prompt_logprobs", "max_tokens", "seed")
"""Options that SGLang names differently or ignores."""


class SGLangAsking:
    """The part of a client that requests completions."""

    def __init__(self, url: str, session: BoundedSession, facts: answers.SGLangFacts) -> None:
        self.url, self.session, self.facts = url, session, facts
        self.version: str | None = None
        """The weights that completions have to be generated with."""

    def write(self, rows: Sequence[Row]) -> list[Completion]:
        """Generates one completion for each prompt, in one request, so that the server can fill its batches.

        Options are named as in [`~rollout.engine.Engine.write`], or else as in SGLang's `sampling_params`. A prompt
        that fills the server's context gets an empty completion.
        """
        fitting, found = self._fitting(rows)
        if fitting:
            body, most, read = self._request([rows[number] for number in fitting])
            written = read(self.session.post(f"{self.url}/generate", json=body, max_bytes=most))
            found.update(zip(fitting, written, strict=True))
        return [found[number] for number in range(len(rows))]

    def write_each(self, rows: Sequence[Row]) -> SGLangRows:
        """As `write`, with one request for each prompt; completions are returned as they end."""
        fitting, unasked = self._fitting(rows)
        requests = [self._request([rows[number]]) for number in fitting]

        def read(number: int, answer: Answer) -> Completion:
            (row,) = requests[number][2](answer)
            return row

        bodies, most = [body for body, _, _ in requests], [size for _, size, _ in requests]
        return SGLangRows(unasked, fitting, self.session.post_each(f"{self.url}/generate", bodies, most, read))

    def _fitting(self, rows: Sequence[Row]) -> tuple[list[int], dict[int, Completion]]:
        """The numbers of the prompts that fit the server, and empty completions for the others."""
        fitting = [number for number, (ids, _) in enumerate(rows) if len(ids) <= self.facts.longest_prompt]
        empty = {
            number: Completion(prompt_ids=ids, completion_ids=[], prompt_logprobs=[], logprobs=[])
            for number, (ids, _) in enumerate(rows)
            if len(ids) > self.facts.longest_prompt
        }
        if empty:
            logger.warning(
                f"{len(empty)} prompts of a batch have more than {self.facts.longest_prompt} tokens, the longest that "
                "the SGLang server reads: their completions are empty."
            )
        return fitting, empty

    def _request(self, rows: Sequence[Row]) -> tuple[dict[str, Any], int, answers.Read]:
        """The body of a request, the limit for its answer in bytes, and a function that reads that."""
        prompts = [ids for ids, _ in rows]
        # An answer repeats its id, which shows that it belongs to this row.
        names = [f"{uuid4().hex}-{number}" for number in range(len(rows))]
        sampling = [self._sampling(ids, options) for ids, options in rows]
        scored = [_scored(options) for _, options in rows]
        body = {
            "rid": names,
            "input_ids": prompts,
            "sampling_params": sampling,
            "return_logprob": [this is not None for this in scored],
            "logprob_start_len": [0 if this else -1 for this in scored],
        }
        version = self.version  # at the time of the request: newer weights may be sent before its answer is read

        def read(answer: Answer) -> list[Completion]:
            found = content(answer, list)
            if len(found) != len(rows):
                raise ServerError(f"The SGLang server answered {len(found)} rows to {len(rows)} prompts.")
            sent = zip(found, names, prompts, sampling, scored, strict=True)
            return [answers.completion(*row, version=version) for row in sent]

        return body, answers.max_answer_bytes(prompts, [one["max_new_tokens"] for one in sampling]), read

    def _sampling(self, ids: list[int], options: dict[str, Any]) -> dict[str, Any]:
        """One row's `sampling_params`. A completion ends with the context of the server, at the latest."""
        others = {name: value for name, value in options.items() if name not in _OF_THE_PROTOCOL}
        most = min(options["max_tokens"], self.facts.room - len(ids))
        return {"stop_token_ids": [], **others, "max_new_tokens": most}


class SGLangRows:
    """The number of each prompt and its completion, as they end; those in `unasked` are known already."""

    def __init__(self, unasked: dict[int, Completion], numbers: Sequence[int], answers: Answers[Completion]) -> None:
        self._unasked, self._numbers, self._answers = unasked, numbers, answers

    def __iter__(self) -> Iterator[tuple[int, Completion]]:
        yield from self._unasked.items()
        for number, row in self._answers:
            yield self._numbers[number], row

    def close(self) -> None:
        """Cancels what has not ended; called from any thread, also while another waits for the next."""
        self._answers.close()


def _scored(options: dict[str, Any]) -> bool | None:
    """Whether log-probabilities of the prompt are requested, or only of the completion; `None` for neither."""
    if options.get("prompt_logprobs") is not None:
        return True
    return None if options.get("logprobs") is None else False
