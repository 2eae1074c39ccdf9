"""Completions of rows by the student, by a teacher, or by one of them from where the student had come to.

B rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from trl_opsd.methods.rewards import BatchRewards
from trl_opsd.methods.rows import BatchRow
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import PromptIds, images_of

Complete = Callable[[list[list[int]]], list[list[int]]]
"""Completions of prompts, as token ids."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Rows with one completion each."""

    rows: list[BatchRow]
    rollout: Rollout
    rewards: np.ndarray | None
    """[B], NaN for a row without one; `None` without reward functions."""
    seconds: float
    """Of writing the completions."""
    clipped: float
    """Share of completions that did not end."""


def episode(trainer: OPSDTrainer, inputs: list[dict[str, Any]], writer: Beginnings | None = None) -> Episode:
    """Completes dataset rows as in an evaluation, at training's temperature; by a writer in the student's place."""
    rewards = next((one for one in trainer.methods if isinstance(one, BatchRewards)), None)
    with trainer.methods.evaluation("audit"):
        rows = trainer.begin_batch(inputs)
        start = perf_counter()
        with trainer._generation.written_by(writer) if writer is not None else nullcontext():
            written = trainer._generation.write(rows, trainer.prompt_ids_of(rows))
        seconds = perf_counter() - start
        trainer.turns.end(rows)
        batch = trainer._batches.note(rows, written)
        found = None if rewards is None else rewards.of_evaluation().numpy()
    rollout = replace(Rollout.unpack(batch), images=images_of(rows))
    ends = set(trainer.eos_token_ids)
    clipped = [not ids or ids[-1] not in ends for ids in written.completions]
    return Episode(rows, rollout, found, seconds, sum(clipped) / len(clipped))


class Beginnings:
    """Has rows begin as they were recorded, and somebody write what follows.

    A turn that was recorded whole is returned as it is, so that tools and environments are called as they were then;
    where a record ends within a turn, or another state was reached, the turn is written from there.

    Args:
        prompts (`Sequence[list[int]]`):
            Of the student, all different, as rows are found by them.
        recorded (`Sequence[list[int]]`):
            The tokens with which each completion begins.
        read (`Sequence[list[int]]`):
            The prompts that who writes reads in the place of these.
        complete (`Callable`):
            Writes what follows prompts.
        ends (`Sequence[int]`), most (`int`):
            End tokens, and the most tokens of a completion.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        recorded: Sequence[list[int]],
        read: Sequence[list[int]],
        complete: Complete,
        ends: Sequence[int],
        most: int,
    ) -> None:
        self._row_of = {tuple(ids): row for row, ids in enumerate(prompts)}
        self._lengths = sorted({len(ids) for ids in prompts})
        self._prompts, self._recorded, self._read = prompts, recorded, read
        self._complete, self._ends, self._most = complete, set(ends), most

    def complete(self, contexts: list[list[int]]) -> list[list[int]]:
        """A turn for each context: prompts, or prompts with the turns so far and what tools answered."""
        begun = [self._begun(ids) for ids in contexts]
        asked = [number for number, (_, _, told) in enumerate(begun) if not told or told[-1] not in self._ends]
        contexts_of = [self._read[row] + so_far + told for row, so_far, told in (begun[number] for number in asked)]
        written = dict(zip(asked, self._complete(contexts_of) if asked else [], strict=True))
        turns = []
        for number, (_, so_far, told) in enumerate(begun):
            turns.append((told + written.get(number, []))[: max(1, self._most - len(so_far))])
        return turns

    def _begun(self, context: list[int]) -> tuple[int, list[int], list[int]]:
        """The row of a context, its completion so far, and what is recorded of this turn."""
        length = next(one for one in self._lengths if tuple(context[:one]) in self._row_of)
        row, so_far = self._row_of[tuple(context[:length])], list(context[length:])
        recorded = self._recorded[row]
        told = recorded[len(so_far) :] if recorded[: len(so_far)] == so_far else []
        end = next((place for place, token in enumerate(told) if token in self._ends), len(told) - 1)
        return row, so_far, told[: end + 1]


def teacher_prompts(trainer: OPSDTrainer, found: Episode) -> list[list[int]]:
    """What the teacher of each row reads before these completions, with its images."""
    read = trainer.teaching.prompts.read(found.rollout, found.rows)
    images = read.images or [None] * len(found.rows)
    return [PromptIds(ids, seen) for ids, seen in zip(read.prompt_lists(), images, strict=True)]


def student_prompts(found: Episode) -> list[list[int]]:
    """What the student reads, with its images."""
    images = found.rollout.images or [None] * len(found.rows)
    return [PromptIds(ids, seen) for ids, seen in zip(found.rollout.prompt_lists(), images, strict=True)]


def completer(trainer: OPSDTrainer, name: str | None) -> Complete:
    """What completes prompts: a teacher by its name, or the student; `ValueError` if it cannot."""
    if name is None:
        return trainer.complete
    limits = trainer.teaching.readers.teacher_limits[name]
    return trainer._generation.writer(trainer.teachers[name], limits).complete
