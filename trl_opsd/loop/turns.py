"""Has completions call tools, turn by turn, until none calls any: token ids are only ever appended to."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING, Any

from trl_opsd._compat.threads import start_thread
from trl_opsd._compat.trl import parse_response
from trl_opsd.environments import Called, Environments
from trl_opsd.environments.environments import Calls, Episode, answers
from trl_opsd.environments.worker import Worker
from trl_opsd.loop.generation import Generation
from trl_opsd.methods.rows import BatchRow, Written
from trl_opsd.parallel.prefetch import Closable
from trl_opsd.parallel.rng import derived_seed, preserved_rng
from trl_opsd.rollout import RolloutBackend
from trl_opsd.rollout.returned import checked_completions

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

_SALT = 2
"""Separates these seeds from those of `lmbda` and of token selection."""
_LONGEST = 256
"""Characters of a token, generously: a text that is too long for as many need not be tokenized."""


@dataclass(slots=True)
class Trajectory:
    """A row so far."""

    prompt_ids: list[int]
    episode: Episode | None
    """In its environment, if there are any."""
    ids: list[int] = field(default_factory=list)
    """What follows the prompt."""
    mask: list[int] = field(default_factory=list)
    """1 for each of these that the student generated."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The same as messages."""
    turns: int = 0
    calls: int = 0
    failures: int = 0

    @property
    def first(self) -> list[int]:
        """The student's first turn, after which tools have answered."""
        return self.ids[: self.mask.index(0)] if 0 in self.mask else self.ids

    @property
    def context(self) -> list[int]:
        """What the student reads next."""
        return self.prompt_ids + self.ids


class Turns:
    """The turns of a batch after the first, in place of TRL's tool loop.

    Token by token as TRL's: a row is its prompt, what the student generated, and what the template makes of the tools'
    answers. With environments, rows do not wait for each other's calls; if the rollout generates in another process,
    they do not wait for each other at all.
    """

    def __init__(
        self,
        host: OPSDTrainer,
        generation: Generation,
        suffix: Callable[[list[dict[str, Any]]], list[int]],
        tools: Sequence[Callable[..., Any]],
        environments: Environments | None,
    ) -> None:
        self._host, self._generation, self.environments = host, generation, environments
        self._suffix = suffix
        """Token ids of tools' answers, and of the beginning of the next turn."""
        self._tools = {tool.__name__: tool for tool in tools}
        self._awaiting = Worker() if any(map(inspect.iscoroutinefunction, tools)) else None
        self.ended: dict[int, Trajectory] = {}
        """Rows of the batch that went their way alone, by their numbers."""
        self.counts: list[tuple[int, int, int]] = []
        """Turns, calls and failed calls of each row of the latest batch; empty without tools."""
        self._said: dict[int, Any] = {}
        """What environments said of rows, which their teachers are not told yet."""

    def begin(self, rows: Sequence[Mapping[str, Any]], batch: str, before: int) -> Sequence[Mapping[str, Any]]:
        """The rows of a batch of this name, after each environment was reset; `before` counts earlier batches."""
        self.ended, self._said = {}, {}
        if self.environments is None:
            return rows
        with self._host.phase("act"), preserved_rng(self._host.accelerator.device):
            return self.environments.begin(rows, batch, self._seeds(len(rows), before))

    def _seeds(self, rows: int, batch: int) -> list[int]:
        """Of the resets of a batch: the same for the rows of a prompt, in any process, and in each evaluation."""
        host, args = self._host, self._host.args
        first, number, step = host.accelerator.process_index * rows, args.num_generations, host.state.global_step
        if not host.model.training:
            first += batch * args.eval_batch_size * host.accelerator.num_processes
            number, step = args.num_generations_eval or number, -1
        # 31 bits: what takes a seed may be another program.
        return [derived_seed(args.seed, step, (first + row) // number, _SALT) >> 32 for row in range(rows)]

    # ---- All rows of a batch, a turn at a time ----------------------------------------------------------------------

    def run(self, prompt_ids: list[list[int]], completions: list[list[int]]) -> Written:
        """Continues the first turn of each row. Collective."""
        if self.ended:
            rows = [self.ended[row] for row in range(len(prompt_ids))]
        else:
            episodes = [None] * len(prompt_ids) if self.environments is None else self.environments.episodes
            rows = [*map(Trajectory, prompt_ids, episodes)]
            calling = [row for row, ids in zip(rows, completions, strict=True) if self._grow(row, ids)]
            while calling:
                with self._host.phase("act"):
                    answered = self._answered(calling)
                asked = [row for row, called in zip(calling, answered, strict=True) if self._asks(row, called)]
                if not asked:
                    break
                written = self._generation.turn([row.context for row in asked]) or ()
                calling = [row for row, ids in zip(asked, written, strict=True) if self._grow(row, ids)]
        self.counts = [(row.turns, row.calls, row.failures) for row in rows]
        masks, said, ids = ([getattr(row, name) for row in rows] for name in ("mask", "messages", "ids"))
        return Written(prompt_ids, ids, masks, said)

    def end(self, rows: Sequence[BatchRow]) -> None:
        """Ends a batch: adds each environment's feedback to its teacher's prompt, if it is not there yet."""
        if self.environments is None:
            return
        if not self.ended:
            with self._host.phase("act"):
                self._said = dict(enumerate(self.environments.feedback(self.environments.episodes)))
        for number, row in enumerate(rows):
            self.tell(number, row)
        self.ended = {}

    def tell(self, number: int, row: BatchRow) -> None:
        """Tells the teacher of a row what its environment said after it; a row that needs that, and has none, ends."""
        if number not in self._said:
            return
        intake = self._host.teaching.readers.intake
        said = self._said.pop(number)
        if said is not None and row.by_student:
            row.request = intake.with_feedback(row.request, said, self._host.args.feedback_template)
        if intake.needs_context and not row.request.tells_more:
            row.gate = 0.0

    # ---- Each row on its own ----------------------------------------------------------------------------------------

    @property
    def are_apart(self) -> bool:
        """Whether rows go their way without waiting for others."""
        rollout = self._generation.rollout
        can = rollout.generates_out_of_process and type(rollout).one_by_one is not RolloutBackend.one_by_one
        # Rows that others have written do not act, and those that act are known by their place.
        all_act = self._host.args.lmbda == 1
        return self.environments is not None and can and all_act and not self._generation.is_overridden

    def first(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The first turns of rows, after all of them have ended. Collective."""
        if not self.ended:
            for _ in self.stream(prompt_ids):
                pass
        return [self.ended[number].first for number in range(len(prompt_ids))]

    def stream(self, prompt_ids: list[list[int]]) -> Closable[tuple[int, list[int]]]:
        """The number of each row with its ids, as it ends. Collective until it returns."""
        self._generation.be_ready()
        ask = self._generation.rollout.one_by_one([*map(list.copy, prompt_ids)], self._host.state.global_step)
        came: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        unwanted, said, ended, environments = Event(), self._said, self.ended, self.environments
        assert environments is not None
        episodes = environments.episodes  # a later batch has others
        rows = [*map(Trajectory, prompt_ids, episodes)]

        def act(number: int) -> None:
            try:
                self._act(number, rows[number], ask, unwanted)
                (said[number],) = environments.feedback([episodes[number]])
                came.put((number, None))
            except BaseException as error:  # raised where rows are taken
                came.put((number, error))

        def ending() -> Generator[tuple[int, list[int]], None, None]:
            try:
                for _ in rows:
                    number, error = came.get()
                    if error is not None:
                        raise error
                    ended[number] = rows[number]
                    yield number, rows[number].ids
            finally:
                unwanted.set()
                for number in {*range(len(rows))} - {*ended}:
                    episodes[number].is_lost = True  # its thread may still act there

        for number in range(len(rows)):
            start_thread("trl_opsd row", act, number)
        return Closable(ending(), unwanted.set)

    def _act(self, number: int, row: Trajectory, ask: Callable[[int, list[int]], list[int]], unwanted: Event) -> None:
        name = type(self._generation.rollout).__name__
        while not unwanted.is_set():
            context = row.context
            (ids,) = checked_completions([ask(number, context)], self._host, [context], name)
            if not (self._grow(row, ids) and self._asks(row, *self._answered([row]))):
                return

    # ---- A row ------------------------------------------------------------------------------------------------------

    def _grow(self, row: Trajectory, ids: list[int]) -> bool:
        """Adds a turn of the student; whether it calls something, and may."""
        before = row.context
        ids = ids[: self._host.limits.completion - len(row.ids)]
        row.ids, row.mask, row.turns = row.ids + ids, row.mask + [1] * len(ids), row.turns + 1
        if not ids and row.turns > 1:
            return False
        # An empty completion cannot be parsed, so a padding token stands for it.
        said, processing = ids or [self._host.processing_class.pad_token_id], self._host.processing_class
        tools = self._host.tools if row.episode is None else list(row.episode.kind.tools.values())
        with self._host.tokenizing:
            row.messages.append(parse_response(processing, said, prefix=before, tools=tools))
        return bool(_calls(row)) and row.turns <= self._host.max_tool_calling_iterations

    def _asks(self, row: Trajectory, called: list[Called] | None) -> bool:
        """Adds what tools answered; whether the row goes on: there are answers, and they leave room."""
        calls, limits = _calls(row), self._host.limits
        row.calls += len(calls)
        row.failures += len(calls) if called is None else sum(one.failed for one in called)
        said = [{"role": "tool", "name": one.name, "content": one.content} for one in called or ()]
        characters = sum(len(one["content"]) for one in said)
        if not said or characters > _LONGEST * limits.completion:
            return False
        with self._host.tokenizing:
            suffix = self._suffix(said)
        length = len(row.ids) + len(suffix)
        if length > limits.completion or len(row.prompt_ids) + length >= (limits.context or math.inf):
            return False
        row.ids, row.mask = row.ids + suffix, row.mask + [0] * len(suffix)
        row.messages += said
        return length < limits.completion

    def _answered(self, rows: Sequence[Trajectory]) -> Sequence[list[Called] | None]:
        """What tools answer to the last turn of each row; `None` where they do not in time."""
        calls = [_calls(row) for row in rows]
        if self.environments is None:
            return [answers(self._tools, some, self._wait) for some in calls]
        return self.environments.call([row.episode for row in rows if row.episode is not None], calls)

    def _wait(self, value: Any) -> Any:
        """Awaits in a thread, as the caller's may have a running loop, as in a notebook."""
        if self._awaiting is None or not inspect.isawaitable(value):
            return value
        return self._awaiting.start(lambda wait: wait(value)).result()


def _calls(row: Trajectory) -> Calls:
    """What the last message calls."""
    calls: Calls = row.messages[-1].get("tool_calls") or () if row.messages else ()
    return calls
