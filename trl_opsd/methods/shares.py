"""Draws the rows of each step by teacher, so that each has its share of the prompts whatever the dataset's order is.

P prompts of a step, over all processes · T teachers
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
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
    order of the dataset; once all rows of a teacher were used, they start again. When `None`, the dataset decides."""


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
        shares, dataset = self.host.args.teacher_shares, self.host.train_dataset
        if dataset is None:
            return
        self._rows = [*rows_of_teachers(dataset, shares).items()]
        self._turns = turns([shares[name] for name, _ in self._rows])
        self._steps: list[Numbers] = []
        """Of each step so far, [P, 2], the teachers of its prompts, and how many rows of each were drawn before."""
        self._orders: dict[int, tuple[int, Numbers]] = {}
        self._passes: dict[str, float] = {}

    def _drawn(self, step: int) -> list[list[int]]:
        while len(self._steps) <= step:
            self._steps.append(np.array([next(self._turns) for _ in range(prompts_of_step(self.host.args))]))
        return self._steps[step].tolist()

    def draw(self, rows: Sequence[int], step: int) -> list[int]:
        return [self._row(*one) for one in self._drawn(step)]

    def _row(self, teacher: int, before: int) -> int:
        """The row of a teacher that is drawn after so many others of it."""
        args, theirs = self.host.args, self._rows[teacher][1]
        done, place = divmod(before, len(theirs))
        if self._orders.get(teacher, (None,))[0] != done:
            draw = np.random.default_rng([args.seed, teacher, done])
            self._orders[teacher] = done, draw.permutation(theirs) if args.shuffle_dataset else theirs
        return int(self._orders[teacher][1][place])

    def before(self, rows: Sequence[BatchRow]) -> None:
        step = self.host.state.global_step
        for teacher, before in self._drawn(step):
            name, theirs = self._rows[teacher]
            self._passes[name] = (before + 1) / len(theirs)
            if self._passes[name].is_integer():
                logger.warning(
                    f"Step {step + 1} ends pass {self._passes[name]:.0f} over the {len(theirs)} rows of the teacher "
                    f"{name!r}, which are drawn again."
                )
        for name, passes in self._passes.items():
            self.host.record_total(f"epochs/teacher/{name}", passes)


def turns(shares: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Numbers of T teachers, without end, each with how often it came before: among n, within one of its share of n.

    The k-th turn of a teacher, from 0, is due while n times its share grows from k to k + 1. Of those that have begun,
    the one that ends first is next, which is in time for all (Liu and Layland 1973, Baruah et al. 1996).
    """
    exact = [Fraction(str(share)) for share in shares]
    weights = [int(one * lcm(*(other.denominator for other in exact))) for one in exact]
    total, came = sum(weights), [0 for _ in weights]
    for n in count(1):
        begun = [teacher for teacher, weight in enumerate(weights) if came[teacher] * total < n * weight]
        teacher = min(begun, key=lambda one: -(-(came[one] + 1) * total // weights[one]))
        yield teacher, came[teacher]
        came[teacher] += 1


def rows_of_teachers(dataset: Dataset, names: Collection[str]) -> dict[str, Numbers]:
    """The numbers of the rows of each teacher, sorted by name; raises `ValueError` for one without rows."""
    of_row = np.array(dataset.with_format(None).select_columns("teacher")[:]["teacher"], dtype=object)
    found = {name: np.flatnonzero(of_row == name) for name in sorted(names)}
    if without := [name for name, rows in found.items() if not len(rows)]:
        raise ValueError(
            f"`teacher_shares` has the teacher {without[0]!r}, but none of the {len(dataset)} rows of train_dataset "
            "names it in the column 'teacher': add rows, or remove the teacher."
        )
    return found


def check_shares(shares: Any, teachers: Collection[str], dataset: Any) -> None:
    """Refuses a training dataset that cannot give the teachers their shares; its columns have been checked."""
    if shares is None:
        return
    option = shown("teacher_shares", shares)
    if {*shares} != {*teachers}:
        raise ValueError(
            f"{option}, but rows are taught by {sorted(teachers)}: expected a share for each, by its name."
        )
    if not isinstance(dataset, Dataset) or has_transform(dataset):
        kind = "rows that `set_transform` computes" if isinstance(dataset, Dataset) else "a stream"
        raise ValueError(
            f"{option} with {kind} as `train_dataset`, whose teachers are not known before rows are read: pass a "
            "`Dataset` that has them, or mix streams by `datasets.interleave_datasets` and remove the option."
        )
    rows_of_teachers(dataset, shares)
