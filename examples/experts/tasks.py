"""The tasks: worked sums, sorting, and the digit that is there twice, whose answers are ten times shorter than sums."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from arithmetic.task import Problem
from datasets import Dataset


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its only right answer."""

    task: str
    text: str
    answer: str

    @property
    def is_held_out(self) -> bool:
        """One in ten."""
        return zlib.crc32(self.text.encode()) % 10 == 0

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


def _sum(source: random.Random) -> tuple[str, str]:
    problem = Problem(first=source.randrange(10, 1000), sign="+", second=source.randrange(10, 1000))
    return problem.question, problem.solution


def _sorting(source: random.Random) -> tuple[str, str]:
    digits = [str(source.randrange(10)) for _ in range(8)]
    return f"{','.join(digits)};", ",".join(sorted(digits))


def _twice(source: random.Random) -> tuple[str, str]:
    digits = source.sample("0123456789", 8)
    digits[source.randrange(1, 8)] = digits[0]
    twice = digits[0]
    source.shuffle(digits)
    return f"{'-'.join(digits)}=", twice


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": _sum,
    "sorting": _sorting,
    "twice": _twice,
}


def draw(task: str, number: int, *, held_out: bool = False, seed: int = 0) -> list[Question]:
    """Distinct questions, either all held out or none."""
    source, drawn = random.Random(f"{task} {seed}"), {}
    while len(drawn) < number:
        question = Question(task, *TASKS[task](source))
        if question.is_held_out == held_out:
            drawn[question.text] = question
    return list(drawn.values())


def rows(questions: list[Question]) -> Dataset:
    """For `OPSDTrainer`: a prompt and the answer, which [`right`] reads."""
    return Dataset.from_dict({name: [getattr(one, name) for one in questions] for name in ("prompt", "answer")})


def right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """1 for each completion that is the answer, 0 for any other."""
    return [float(said[0]["content"] == wanted) for said, wanted in zip(completions, answer, strict=True)]
