"""Draws the rows of each step by teacher, so that each has its share of the prompts whatever the dataset's order is.

P prompts of a step, over all processes · T teachers
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Annotated, Any, ClassVar, final

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset

from trl_opsd.data.survey import Numbers, has_transform
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.monitor.metrics import Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import prompts_of_step
from trl_opsd.options.table import Option, Values, above, shown

logger = get_logger(__name__)

_SHARES = Values(
    "a dict of the names of at least two teachers with a finite number above 0 for each, as {'math': 2, 'code': 1}",
    lambda value: (
        isinstance(value, dict)
        and len(value) > 1
        and all(isinstance(name, str) and above(0).fits(share) for name, share in value.items())
    ),
)


@with_help
@dataclass
class ShareOptions:
    teacher_shares: Annotated[dict | str | None, Option(_SHARES | None, resumed=True)] = None
    """Share of each teacher in the prompts of every optimizer step, for instance `{"math": 2, "code": 1}`, whatever the
    order of the dataset; a teacher's rows come again once they are used up. When `None`, as the dataset has them."""


@final
class Shares(Method):
    """Draws rows by the number of the step alone, so that all processes and a resumed run draw the same.

    Rows of a teacher come without replacement, shuffled anew for each pass over them.
    """

    metrics: ClassVar = {
        "epochs/teacher/<name>": Metric(
            "passes",
            "How often the rows of this teacher were drawn.",
            Logs("the same in all processes; total since the run began", "`teacher_shares`", evaluated=False),
        ),
    }

    @classmethod
    def of(cls, now: Any) -> Shares | None:
        return None if now.teacher_shares is None else cls()

    def begin(self) -> None:
        args, dataset = self.host.args, self.host.train_dataset
        if dataset is None:
            return
        self._rows = rows_of_teachers(dataset, names := sorted(args.teacher_shares))
        self._next = turns([args.teacher_shares[name] for name in names])
        self._turns: list[list[int]] = []
        """Of each step, the teachers of its P prompts."""
        self._drawn = [np.zeros(len(names), int)]
        """Before each step, [T], how many rows of each teacher were drawn."""
        self._orders: dict[int, tuple[int, Numbers]] = {}

    def _before_and_after(self, step: int) -> tuple[Numbers, Numbers]:
        """[T] each, how many rows of each teacher are drawn before the end of the step before, and of this one."""
        while len(self._turns) <= step:
            self._turns.append([next(self._next) for _ in range(prompts_of_step(self.host.args))])
            self._drawn.append(self._drawn[-1] + np.bincount(self._turns[-1], minlength=len(self._rows)))
        return self._drawn[step], self._drawn[step + 1]

    def draw(self, rows: Sequence[int], step: int) -> list[int]:
        drawn, found = self._before_and_after(step)[0].tolist(), []
        for teacher in self._turns[step]:
            found.append(self._row(teacher, drawn[teacher]))
            drawn[teacher] += 1
        return found

    def _row(self, teacher: int, number: int) -> int:
        """The row of a teacher that is drawn after so many others."""
        theirs = [*self._rows.values()][teacher]
        done, place = divmod(number, len(theirs))
        if not self.host.args.shuffle_dataset:
            return int(theirs[place])
        if self._orders.get(teacher, (None,))[0] != done:
            draw = np.random.default_rng([self.host.args.seed, teacher, done])
            self._orders[teacher] = done, draw.permutation(theirs)
        return int(self._orders[teacher][1][place])

    def before(self, rows: Sequence[BatchRow]) -> None:
        step = self.host.state.global_step
        for (name, theirs), before, after in zip(self._rows.items(), *self._before_and_after(step), strict=True):
            self.host.record_total(f"epochs/teacher/{name}", after / len(theirs))
            if (passes := after // len(theirs)) > before // len(theirs):
                logger.warning(
                    f"Step {step + 1} ends pass {passes} over the {len(theirs)} rows of the teacher {name!r}, which "
                    "are drawn again."
                )


def turns(shares: Sequence[float]) -> Iterator[int]:
    """Numbers of T teachers, without end: among the first n, each has its share of n, to within one.

    The k-th draw of a teacher, from 0, is due in the time in which its share alone makes k become k + 1; of those that
    have begun, the one that ends first is drawn, which keeps all of them if any order does (Baruah et al. 1996).
    """
    exact = [Fraction(str(share)) for share in shares]
    common = lcm(*(one.denominator for one in exact))
    weights = [int(one * common) for one in exact]
    total, drawn, n = sum(weights), [0 for _ in weights], 0
    while True:
        ends = [
            (-(-(k + 1) * total // weight), number)
            for number, (k, weight) in enumerate(zip(drawn, weights, strict=True))
            if k * total < (n + 1) * weight
        ]
        _, number = min(ends)
        drawn[number] += 1
        n += 1
        yield number


def rows_of_teachers(dataset: Dataset, names: Collection[str]) -> dict[str, Numbers]:
    """The numbers of the rows of each teacher; raises `ValueError` for one without rows."""
    of_row = np.array(dataset.with_format(None).select_columns("teacher")[:]["teacher"], dtype=object)
    found = {name: np.flatnonzero(of_row == name) for name in names}
    if without := [name for name, rows in found.items() if not len(rows)]:
        raise ValueError(
            f"`teacher_shares` has the teacher {without[0]!r}, but none of the {len(dataset)} rows of train_dataset "
            "names it in the column 'teacher': add rows, or remove the teacher."
        )
    return found


def check_shares(shares: Any, teachers: Collection[str], dataset: Any) -> None:
    """Refuses a training dataset of which these teachers cannot have these shares; its columns have been checked."""
    if shares is None:
        return
    option = shown("teacher_shares", shares)
    if {*shares} != {*teachers}:
        raise ValueError(
            f"{option}: rows are taught by {sorted(teachers)}: expected a share for each of several teachers, by the "
            "names in the dict `teacher_model`."
        )
    if not isinstance(dataset, Dataset) or has_transform(dataset):
        kind = "rows that `set_transform` computes when they are read" if isinstance(dataset, Dataset) else "a stream"
        raise ValueError(
            f"{option} with {kind} as `train_dataset`, of which it is not known whose rows come when: pass a "
            "`datasets.Dataset` that has them, or interleave streams (`datasets.interleave_datasets` with "
            "`probabilities`) and remove the option."
        )
    rows_of_teachers(dataset, shares)
