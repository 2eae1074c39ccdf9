"""Has completions call tools, turn by turn, until none calls any: token ids are only ever appended to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from trl_opsd._compat.trl import parse_response
from trl_opsd.environments import Called, Environments
from trl_opsd.environments.environments import answers
from trl_opsd.environments.worker import Wait, Worker
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.trainer_host import TrainerHost

Turned: TypeAlias = tuple[list[list[int]], list[list[dict[str, Any]]], list[list[int]], int, int, list[list[Any]]]
"""As TRL's tool loop returns it: masks, conversations, completions, calls, failed calls, and images of each row."""

_LONGEST = 256
"""Characters of a token, generously: a text that is too long for as many need not be tokenized."""


class Turns:
    """The turns of a batch after the first, in place of TRL's tool loop.

    Token by token as TRL's: a row is its prompt, what the student generated, and what the template makes of the tools'
    answers. Calls of different rows do not wait for each other where there are environments.
    """

    def __init__(
        self,
        host: TrainerHost,
        generation: Generation,
        tools: Sequence[Callable[..., Any]],
        environments: Environments | None,
    ) -> None:
        self._host, self._generation, self.environments = host, generation, environments
        self._tools = {tool.__name__: tool for tool in tools}
        self._awaiting = Worker() if any(map(inspect.iscoroutinefunction, tools)) else None

    def run(
        self,
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        completions: list[list[dict[str, Any]]],
        suffix: Callable[[list[dict[str, Any]]], list[int]],
    ) -> Turned:
        """Continues the first turn of each row; `suffix` makes token ids of tools' answers. Collective."""
        host = self._host
        masks = [[1] * len(ids) for ids in completion_ids]
        turns, count, failures = [1] * len(masks), 0, 0
        calling = {row: calls for row, (first,) in enumerate(completions) if (calls := first.get("tool_calls"))}
        while calling and max(turns) <= host.max_tool_calling_iterations:
            with host.phase("act"):
                answered = self._answered(calling)
            asked = {}
            for row, called in answered.items():
                count += len(calling[row])
                failures += len(calling[row]) if called is None else sum(one.failed for one in called)
                said = [{"role": "tool", "name": one.name, "content": one.content} for one in called or ()]
                ids = self._followed(prompt_ids[row], completion_ids[row], said, suffix)
                if ids is not None:
                    asked[row] = ids
                    completions[row] += said
            if not asked:
                break
            written = self._generation.turn(list(asked.values()))
            calling = {}
            for (row, before), ids in zip(asked.items(), written, strict=True):
                begun = before[len(prompt_ids[row]) :]
                ids = ids[: host.limits.completion - len(begun)]
                masks[row] += [0] * (len(begun) - len(completion_ids[row])) + [1] * len(ids)
                completion_ids[row] = begun + ids
                turns[row] += 1
                if ids:
                    message = parse_response(host.processing_class, ids, prefix=before, tools=self._tools_of(row))
                    completions[row].append(message)
                    if calls := message.get("tool_calls"):
                        calling[row] = calls
        host.record("turns/mean", sum(turns) / len(turns))
        return masks, completions, completion_ids, count, failures, [[] for _ in masks]

    def _tools_of(self, row: int) -> list[Callable[..., Any]]:
        if self.environments is not None:
            return self.environments.tools_of(self.environments.name(row))
        tools: list[Callable[..., Any]] = self._host.tools
        return tools

    def _answered(self, calls: Mapping[int, Sequence[Mapping[str, Any]]]) -> Mapping[int, list[Called] | None]:
        if self.environments is not None:
            return self.environments.call(calls)
        return {row: answers(self._tools, some, self._wait) for row, some in calls.items()}

    def _wait(self, value: Any) -> Any:
        """Awaits in a thread, as the caller's may have a running loop, as in a notebook."""
        if self._awaiting is None or not inspect.isawaitable(value):
            return value
        job: Callable[[Wait], Any] = lambda wait: wait(value)  # noqa: E731
        return self._awaiting.start(job).result()

    def _followed(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        said: list[dict[str, Any]],
        suffix: Callable[[list[dict[str, Any]]], list[int]],
    ) -> list[int] | None:
        """The ids of a row with the answers of its tools; `None` if there are none, or they leave no room."""
        limits = self._host.limits
        characters = sum(len(one["content"]) for one in said if isinstance(one["content"], str))
        if not said or characters > _LONGEST * limits.completion:
            return None
        ids = prompt_ids + completion_ids + suffix(said)
        has_room = limits.context is None or len(ids) < limits.context
        return ids if has_room and len(ids) - len(prompt_ids) <= limits.completion else None
