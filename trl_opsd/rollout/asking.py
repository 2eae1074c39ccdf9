"""Asks a vLLM server for completions, all at once or row by row; any process can, and it knows nothing of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trl_opsd.rollout import answers
from trl_opsd.rollout.sessions import content
from trl_opsd.run.bounded_http import Answer, Answers, BoundedSession
from trl_opsd.types import Completion


class Asking:
    """The part of a client that asks for completions.

    Attributes:
        base_url (`str`): the address of the server.
        model (`str`): the name of its model.
        session ([`~run.bounded_http.BoundedSession`]): sends the requests.
    """

    base_url: str
    model: str
    session: BoundedSession

    def write(self, prompt_ids: list[list[int]], options: dict[str, Any]) -> list[Completion]:
        """Generates one completion for each prompt.

        Args:
            prompt_ids (`list[list[int]]`):
                Not padded.
            options (`dict`):
                For all prompts, named as in the server's API.
        """
        answer = self.session.post(
            self._url, json=self._body(prompt_ids, options), max_bytes=answers.max_answer_bytes(prompt_ids, options)
        )
        return answers.completions(content(answer), prompt_ids, options)

    def write_each(self, prompt_ids: list[list[int]], options: list[dict[str, Any]]) -> Answers[Completion]:
        """As [`RowEngine.write_each`], with one request for each prompt."""

        def read(row: int, answer: Answer) -> Completion:
            (completion,) = answers.completions(content(answer), [prompt_ids[row]], options[row])
            return completion

        rows = list(zip(prompt_ids, options, strict=True))
        bodies = [self._body([ids], theirs) for ids, theirs in rows]
        most = [answers.max_answer_bytes([ids], theirs) for ids, theirs in rows]
        return self.session.post_each(self._url, bodies, most, read)

    @property
    def _url(self) -> str:
        return f"{self.base_url}/v1/completions"

    def _body(self, prompt_ids: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
        asked = {"model": self.model, "prompt": prompt_ids, **options}
        return {**asked, "return_token_ids": True, "return_tokens_as_token_ids": True}


@dataclass
class RowClient(Asking):
    """A client of a process that sends no weights."""

    base_url: str
    model: str
    session: BoundedSession
