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

from trl_opsd.cli.audit.tokens import FEW, Mean, Tokens
from trl_opsd.methods.rewards import Rewards
from trl_opsd.methods.rows import BatchRow
from trl_opsd.trainer import OPSDTrainer
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import PromptIds, images_of

Complete = Callable[[Sequence[int], list[list[int]]], list[list[int]]]
"""Completions of prompts, token ids, by the numbers of their rows."""


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
    """Completes dataset rows as in an evaluation, at training's temperature; by a writer in the student's place.

    Environments are reset with the same seeds in each call, so that a row is the same task whoever completes it.
    """
    rewards = trainer.methods.get(Rewards)
    with trainer.methods.evaluation("audit"):
        batches = trainer._stats.now.batches
        rows = trainer._batches.begin(inputs)
        trainer._stats.now.batches = batches  # the seeds of an evaluation follow from the batches before
        start = perf_counter()
        with trainer._generation.substituted(writer) if writer is not None else nullcontext():
            written = trainer._generation.write(rows, trainer.prompt_ids_of(rows))
        seconds = perf_counter() - start
        if trainer.turns is not None:
            trainer.turns.end(rows)
        rollout = trainer._batches.counted(rows, written)
        found = rewards.of_evaluation().numpy() if rewards is not None and rewards.given else None
    rollout = replace(rollout, images=images_of(rows))
    ends = set(trainer.eos_token_ids)
    clipped = [not ids or ids[-1] not in ends for ids in written.completions]
    return Episode(rows, rollout, found, seconds, sum(clipped) / len(clipped))


class Beginnings:
    """Has rows begin as they were recorded, and somebody write what follows.

    A turn that was recorded whole is returned as it is, so that tools and environments are called as they were then;
    where a record ends within a turn, or another state was reached, the turn is written from there.

    Args:
        prompts (`Sequence[list[int]]`):
            Of the student.
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
        self._so_far: list[list[int]] = [[] for _ in prompts]
        """Of each row, what was returned, and what tools answered before that."""
        self._prompts, self._recorded, self._read = prompts, recorded, read
        self._complete, self._ends, self._most = complete, set(ends), most

    def complete(self, contexts: list[list[int]]) -> list[list[int]]:
        """A turn for each context: the prompts of all rows first, then those of some with the turns so far."""
        rows = self._rows_of(contexts)
        so_far = {row: list(ids[len(self._prompts[row]) :]) for row, ids in zip(rows, contexts, strict=True)}
        told = {row: self._told(row, so_far[row]) for row in rows}
        asked = [row for row in rows if not told[row] or told[row][-1] not in self._ends]
        written = self._complete(asked, [self._read[row] + so_far[row] + told[row] for row in asked]) if asked else []
        for row, ids in zip(asked, written, strict=True):
            told[row] = told[row] + ids
        turns = [told[row][: max(1, self._most - len(so_far[row]))] for row in rows]
        for row, turn in zip(rows, turns, strict=True):
            self._so_far[row] = so_far[row] + turn
        return turns

    def _rows_of(self, contexts: Sequence[list[int]]) -> list[int]:
        """The row of each context: that of its place, or the one that has come so far."""
        if [*map(list, contexts)] == [*map(list, self._prompts)]:
            return list(range(len(contexts)))
        begun = [list(prompt) + so_far for prompt, so_far in zip(self._prompts, self._so_far, strict=True)]
        left = sorted(range(len(begun)), key=lambda row: -len(begun[row]))  # one may be the beginning of another
        found = []
        for context in contexts:
            found.append(next(row for row in left if list(context[: len(begun[row])]) == begun[row]))
            left.remove(found[-1])
        return found

    def _told(self, row: int, so_far: list[int]) -> list[int]:
        """What is recorded of the turn that follows; nothing where the row has come to another state."""
        recorded = self._recorded[row]
        told = recorded[len(so_far) :] if recorded[: len(so_far)] == so_far else []
        end = next((place for place, token in enumerate(told) if token in self._ends), len(told) - 1)
        return told[: end + 1]


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
        return lambda _, prompts: trainer.complete(prompts)
    writer = trainer._generation.teacher_rollout(trainer.teachers[name], trainer.teaching.readers.teacher_limits[name])
    return lambda _, prompts: writer.complete(prompts)


def tried(
    trainer: OPSDTrainer,
    inputs: list[dict[str, Any]],
    written: Episode,
    tokens: Tokens,
    complete: dict[str, Complete],
) -> dict[str, Any]:
    """What teachers make of the same prompts, and of the places where the student's mistakes have led it."""
    rewards, ids = written.rewards, written.rollout.completion_lists()
    assert rewards is not None, "there are reward functions"
    mine, theirs = student_prompts(written), teacher_prompts(trainer, written)
    names = [row.request.teacher for row in written.rows]
    ends, most = trainer.eos_token_ids, trainer.limits.completion

    def written_after(begun: Sequence[list[int]], by_teacher: bool) -> Episode:
        read = theirs if by_teacher else mine
        write = _by_name(names, complete) if by_teacher else completer(trainer, None)
        return episode(trainer, inputs, Beginnings(mine, begun, read, write, ends, most))

    every = range(len(ids))
    start = written_after([[] for _ in every], by_teacher=True)
    assert start.rewards is not None, "as of the student"
    found: dict[str, Any] = {"knows": Mean.of(start.rewards - rewards), "own": Mean.of(start.rewards)}
    found["clipped"] = start.clipped
    # After the sampled token that the teacher likes least against the student, which is the mistake: where both differ
    # most the token may be right, and so what follows. In rows that are worse than others, where something is left.
    cuts = {}
    for row in every:
        mine_n = tokens.row == row
        if mine_n.any() and rewards[row] < max(np.nanmax(start.rewards), np.nanmax(rewards)):
            end = int(tokens.place[mine_n][tokens.advantage[mine_n].argmin()]) + 1
            if end < len(ids[row]) - 1 or (end < len(ids[row]) and ids[row][end] not in ends):
                cuts[row] = ids[row][:end]
    if len(cuts) >= FEW:
        # All rows, so that environments get the same seeds; the others end at once.
        begun, some = [cuts.get(row, ends[:1]) for row in every], list(cuts)
        of_teacher, of_student = (written_after(begun, by_teacher).rewards for by_teacher in (True, False))
        assert of_teacher is not None, "as above"
        assert of_student is not None, "as above"
        found["recovers"] = Mean.of(of_teacher[some] - of_student[some])
        found["after"] = Mean.of(of_teacher[some]), Mean.of(of_student[some])
    return found


def _by_name(names: Sequence[str], complete: dict[str, Complete]) -> Complete:
    """What completes prompts, each by the teacher of its row."""

    def written(rows: Sequence[int], prompts: list[list[int]]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for name in dict.fromkeys(names):
            some = {row: ids for row, ids in zip(rows, prompts, strict=True) if names[row] == name}
            if some:
                found.update(zip(some, complete[name](list(some), list(some.values())), strict=True))
        return [found[row] for row in rows]

    return written
