"""Requests completions from a vLLM server, all at once or row by row, from any process; knows nothing of weights."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trl_opsd.http.bounded_http import Answer, Answers, BoundedSession
from trl_opsd.rollout import answers
from trl_opsd.rollout.engine import Row
from trl_opsd.rollout.sessions import content
from trl_opsd.types import Completion

_REQUESTS = 16
"""Maximum of concurrent requests; prompts with the same options share one."""


class Asking:
    """The part of a client that requests completions."""

    def __init__(self, url: str, session: BoundedSession, facts: answers.ServerFacts) -> None:
        self.url, self.session, self.facts = url, session, facts
        self.version: str | None = None  # a vLLM server does not report which weights generated a completion

    def write(self, rows: Sequence[Row]) -> list[Completion]:
        """Generates one completion for each prompt, with one request for all prompts with the same options."""
        by_options: dict[str, list[int]] = defaultdict(list)
        for number, (_, options) in enumerate(rows):
            by_options[json.dumps(options, sort_keys=True)].append(number)

        def ask(numbers: list[int]) -> list[tuple[int, Completion]]:
            written = self.ask([rows[number][0] for number in numbers], rows[numbers[0]][1])
            return list(zip(numbers, written, strict=True))

        with ThreadPoolExecutor(max_workers=_REQUESTS) as pool:
            found = dict(pair for pairs in pool.map(ask, by_options.values()) for pair in pairs)
        return [found[number] for number in range(len(rows))]

    def ask(self, prompt_ids: list[list[int]], options: dict[str, Any]) -> list[Completion]:
        """Generates one completion for each prompt, all with the same options, in one request."""
        answer = self.session.post(
            self._route, json=self._body(prompt_ids, options), max_bytes=answers.max_answer_bytes(prompt_ids, options)
        )
        return answers.completions(content(answer), prompt_ids, options)

    def write_each(self, rows: Sequence[Row]) -> Answers[Completion]:
        """As `write`, with one request for each prompt; completions are returned as they end."""

        def read(row: int, answer: Answer) -> Completion:
            ids, options = rows[row]
            (completion,) = answers.completions(content(answer), [ids], options)
            return completion

        bodies = [self._body([ids], options) for ids, options in rows]
        most = [answers.max_answer_bytes([ids], options) for ids, options in rows]
        return self.session.post_each(self._route, bodies, most, read)

    @property
    def _route(self) -> str:
        return f"{self.url}/v1/completions"

    def _body(self, prompt_ids: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
        asked = {"model": self.facts.model, "prompt": prompt_ids, **options}
        # Ids instead of text, which does not determine the ids.
        return {**asked, "return_token_ids": True, "return_tokens_as_token_ids": True}
