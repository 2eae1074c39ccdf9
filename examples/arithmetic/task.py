"""Sums and differences worked out column by column: problems, worked solutions, the split, and grading."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from datasets import Dataset

DIGITS = (2, 3)
"""Numbers of digits that an operand may have."""

HELD_OUT_SHARE = 10
"""One problem in this many is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A sum, or a difference that is not negative.

    Example:

    ```python
    >>> problem = Problem(first=47, sign="+", second=85)
    >>> problem.question, problem.solution
    ('47+85=', '7+5=12,4+8+1=13;132')
    ```
    """

    first: int
    sign: str
    second: int

    @property
    def question(self) -> str:
        return f"{self.first}{self.sign}{self.second}="

    @property
    def answer(self) -> int:
        return self.first + self.second if self.sign == "+" else self.first - self.second

    @property
    def solution(self) -> str:
        """Column by column from the right, with carries and borrows written out; then the answer."""
        return f"{','.join(_columns(self))};{self.answer}"

    @property
    def is_held_out(self) -> bool:
        """Whether it is excluded from training; the same for `85+47` as for `47+85`."""
        numbers = sorted((self.first, self.second))
        return zlib.crc32(f"{numbers[0]}{self.sign}{numbers[1]}".encode()) % HELD_OUT_SHARE == 0

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    @property
    def prompt_with_solution(self) -> list[dict[str, str]]:
        """The prompt with the worked solution after the question."""
        return [{"role": "user", "content": self.question + self.solution}]

    @property
    def completion(self) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": self.solution}]


def _columns(problem: Problem) -> list[str]:
    length = max(len(str(problem.first)), len(str(problem.second)))
    rows = [[int(digit) for digit in f"{number:0{length}}"[::-1]] for number in (problem.first, problem.second)]
    write = _add_column if problem.sign == "+" else _subtract_column
    columns, carry = [], 0
    for above, below in zip(*rows, strict=True):
        column, carry = write(above, below, carry)
        columns.append(column)
    return columns


def _add_column(above: int, below: int, carry: int) -> tuple[str, int]:
    total = above + below + carry
    return f"{above}+{below}{'+1' * carry}={total}", total // 10


def _subtract_column(above: int, below: int, borrowed: int) -> tuple[str, int]:
    borrow = int(above < below + borrowed)
    above += 10 * borrow
    return f"{above}-{below}{'-1' * borrowed}={above - below - borrowed}", borrow


def draw(number: int, *, held_out: bool = False, seed: int = 0, digits: tuple[int, ...] = DIGITS) -> list[Problem]:
    """Distinct problems, either all held out or none."""
    source = random.Random(seed)
    drawn: dict[Problem, None] = {}
    while len(drawn) < number:
        problem = _any_problem(source, digits)
        if problem.is_held_out == held_out:
            drawn[problem] = None
    return list(drawn)


def _any_problem(source: random.Random, digits: tuple[int, ...]) -> Problem:
    first, second = (source.randrange(10 ** (length - 1), 10**length) for length in source.choices(digits, k=2))
    sign = source.choice("+-")
    if sign == "-" and first < second:
        first, second = second, first
    return Problem(first=first, sign=sign, second=second)


def prompts(problems: list[Problem]) -> Dataset:
    """Rows for an on-policy trainer: questions only."""
    return Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})


def prompts_with_solutions(problems: list[Problem]) -> Dataset:
    """The same rows with the worked solution, which only the teacher sees."""
    return prompts(problems).add_column("privileged_context", [problem.solution for problem in problems])


def prompts_with_answers(problems: list[Problem]) -> Dataset:
    """The same rows with the answer, which [`right`] needs."""
    return prompts(problems).add_column("answer", [problem.answer for problem in problems])


def is_right(problem: Problem, completion: str) -> bool:
    """Whether the number after the last `;` is the answer; the columns before it are not checked."""
    return _has_answer(completion, problem.answer)


def right(completions: list[list[dict[str, str]]], answer: list[int], **_: object) -> list[float]:
    """A reward as TRL's trainers call it: 1 for each completion with the right answer, else 0."""
    return [float(_has_answer(messages[-1]["content"], one)) for messages, one in zip(completions, answer, strict=True)]


def _has_answer(completion: str, answer: int) -> bool:
    _, found, written = completion.rpartition(";")
    return bool(found) and written.strip() == str(answer)
