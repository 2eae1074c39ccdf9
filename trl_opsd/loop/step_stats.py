"""Counts the rows of an optimizer step or an evaluation: sums of each, reduced over processes once, then logged.

R rows of a generation batch, over all processes · B rows of a micro-batch · G prompts · n completions of each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from trl_opsd.config import OPSDConfig
from trl_opsd.monitor.accounts import Accounts
from trl_opsd.types import LossParts
from trl_opsd.types.loss import columns

__all__ = ["CANDIDATES", "MicroBatch", "StepStats", "spread"]

CANDIDATES = "selected_from"
"""Key of a batch: [B], number of tokens of each row that `token_selection` selects from."""
_BY_TEACHER = ("weight", "divergence", "teacher_entropy")
"""Statistics that are also kept by teacher, where there are several."""
_BY_PROMPT = ("weight", "divergence", "tokens")
"""Statistics of each row that the completions of a prompt are compared by."""


class Counted(Protocol):
    """The trainer, as its statistics see it."""

    args: OPSDConfig
    model: Any
    accelerator: Accelerator
    row_group: Any

    @property
    def teacher_names(self) -> tuple[str, ...]: ...
    def record(self, name: str, value: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The statistics of a micro-batch."""

    rows: Tensor
    """[B, columns], of this process's rows: `LossParts.rows`, and columns of each teacher."""
    named: dict[str, float]
    """Sums over the rows of all processes, by name; without those of options that are off."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A micro-batch that is not reduced yet."""

    batch: Mapping[str, Any]
    rows: Tensor
    scored: Tensor | None
    """`LossParts.scored`."""


@final
class StepStats:
    """Statistics of a training since its last log, and of an evaluation; `watch` is entered around each phase."""

    def __init__(self, trainer: Counted, watch: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._trainer = trainer
        self._accounts = {mode: Accounts(watch) for mode in ("train", "eval")}
        self._waiting: list[_Waiting] = []
        self._tables: dict[str, np.ndarray] = {}
        self._evaluated: list[Tensor] | None = None
        """[*, 3] each, rows of the evaluation in progress, in their order."""

    @property
    def now(self) -> Accounts:
        """Sums and seconds of the training, or of the evaluation, by the mode of the model."""
        return self._accounts["train" if self._trainer.model.training else "eval"]

    def phase(self, name: str, mode: str | None = None) -> AbstractContextManager[None]:
        """Times a phase; of a training (`"train"`), an evaluation (`"eval"`), or as the model is."""
        return (self.now if mode is None else self._accounts[mode]).clock(name)

    def clear(self) -> None:
        """Drops what an interrupted training left."""
        self._accounts["train"].clear()
        self._waiting, self._tables = [], {}

    def means(self) -> dict[str, float]:
        """Means over tokens of the training since its last log, and seconds of each phase; empty without tokens."""
        if found := self._accounts["train"].metrics(per_batch=True):
            self._accounts["train"].clear()
        return found

    # ---- Rows ---------------------------------------------------------------------------------------------------

    def by_teacher(self, rows: Tensor, teacher: Tensor | None) -> Tensor:
        """The statistics of rows, [B, columns], and again by teacher; does not wait for the device."""
        number = len(self._trainer.teacher_names)
        if not number:
            return rows
        # `teacher` is in host memory: the comparison runs there, and its result is copied without waiting.
        is_its_BT = torch.zeros(len(rows), number) if teacher is None else teacher[:, None] == torch.arange(number)
        is_its_B1T = is_its_BT[:, None].to(rows.device, rows.dtype, non_blocking=True)
        return torch.cat([rows, (columns(rows, *_BY_TEACHER)[..., None] * is_its_B1T).flatten(1)], dim=1)

    def add(self, batch: Mapping[str, Any], rows: Tensor, scored: Tensor | None) -> None:
        """Adds a micro-batch of the step; `rows` are those of `by_teacher`."""
        self._waiting.append(_Waiting(batch, rows, scored))

    def reduced(self) -> list[MicroBatch]:
        """The micro-batches that were added since, summed over processes. Waits for the device; collective."""
        waiting, self._waiting = self._waiting, []
        tables = self._empty_tables()
        for one in waiting:
            _add_to(tables, one)
        # One reduction of everything that is known by now, before the backward pass that the step follows.
        tables["sums"] = torch.stack([one.rows.sum(0) for one in waiting])
        found = self._trainer.accelerator.reduce(torch.cat([one.flatten() for one in tables.values()]), "sum")
        ends = np.cumsum([one.numel() for one in tables.values()])[:-1]
        parts = np.split(np.array(found.tolist(), dtype=np.float32), ends)  # the one wait of a step
        self._tables = {name: part.reshape(one.shape) for (name, one), part in zip(tables.items(), parts, strict=True)}
        sums = self._tables.pop("sums").tolist()
        return [self._micro_batch(one.batch, one.rows, each) for one, each in zip(waiting, sums, strict=True)]

    def evaluated(self, batch: Mapping[str, Any], rows: Tensor, distinct: Tensor) -> list[MicroBatch]:
        """A batch of an evaluation, by its `distinct` rows of all processes. Waits for the device."""
        if self._evaluated is not None and self._generations > 1 and self._trainer.row_group is None:
            self._evaluated.append(columns(distinct, *_BY_PROMPT))
        return [self._micro_batch(batch, rows, distinct.sum(0).tolist())]

    def _micro_batch(self, batch: Mapping[str, Any], rows: Tensor, sums: Sequence[float]) -> MicroBatch:
        of_teachers = [f"{name}/{teacher}" for name in _BY_TEACHER for teacher in self._trainer.teacher_names]
        named = dict(zip((*LossParts.ROW_NAMES, *of_teachers), sums, strict=True))
        # The sums of an option that is off are 0, which would be logged as if measured.
        needed = {
            "clipped": self._trainer.args.clips_entries or None,
            "pulled": batch.get("pull"),
            "importance": batch.get("logprobs"),
        }
        return MicroBatch(
            rows=rows, named={name: one for name, one in named.items() if needed.get(name, 0) is not None}
        )

    # ---- What a step logs besides means over tokens -------------------------------------------------------------

    def _empty_tables(self) -> dict[str, Tensor]:
        """Zeros, also where this process has nothing to count, as the reduction is collective."""
        args, sizes = self._trainer.args, dict[str, tuple[int, ...]]()
        if self._trainer.row_group is not None:  # its processes count parts of rows
            return {}
        if args.num_generations > 1:
            rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
            sizes["prompts"] = rows * self._trainer.accelerator.num_processes, len(_BY_PROMPT)
        if args.lmbda < 1:
            sizes["sources"] = (2, 3)
        if args.build_selection() is not None:
            sizes["selection"] = (4,)
        return {
            name: torch.zeros(size, dtype=torch.float32, device=self._trainer.accelerator.device)
            for name, size in sizes.items()
        }

    def record_step(self) -> None:
        """Records how the completions of a prompt differ, on- and off-policy rows, and the selected tokens."""
        tables, self._tables, record = self._tables, {}, self._trainer.record
        if "prompts" in tables:
            self._record_spread(torch.from_numpy(tables["prompts"]), self._trainer.args.num_generations)
        if "sources" in tables:
            (of_student, *student), (of_others, *others) = tables["sources"].tolist()
            if of_student + of_others:
                record("off_policy/share", of_others / (of_student + of_others))
            if of_student:
                record("on_policy/divergence", student[1] / student[0])
            if of_others:
                record("off_policy/divergence", others[1] / others[0])
        if "selection" in tables:
            selected, candidates, scored, score = tables["selection"].tolist()
            if candidates:
                record("selection/share", selected / candidates)
            if scored:
                record("selection/score", score / scored)

    def _record_spread(self, sums_R3: Tensor, number: int) -> None:
        for name, value in spread(sums_R3, number).items():
            self._trainer.record(name, value)

    # ---- Evaluations --------------------------------------------------------------------------------------------

    @property
    def _generations(self) -> int:
        return self._trainer.args.num_generations_eval or self._trainer.args.num_generations

    @contextmanager
    def evaluation(self) -> Iterator[Accounts]:
        """Counts the rows of an evaluation, and records at its end how the completions of a prompt differ."""
        accounts = self._accounts["eval"]
        accounts.clear()  # left by an interrupted evaluation
        rows = self._evaluated = []
        try:
            yield accounts
        finally:
            self._evaluated = None
        if rows:
            self._record_spread(torch.cat(rows), self._generations)


def _add_to(tables: Mapping[str, Tensor], one: _Waiting) -> None:
    """Adds the rows of a micro-batch to the tables of its step, on its device."""
    rows, requests = one.rows, one.batch.get("rows") or ()
    weight_B, divergence_B, tokens_B = columns(rows, "weight", "divergence", "tokens").unbind(1)
    counted_B = (weight_B > 0).to(rows.dtype)  # a row repeated only to keep collectives matched has no weight
    # Rows that no dataset gave have neither a place nor a mark.
    places = [getattr(row, "place", None) for row in requests]
    if "prompts" in tables and places and None not in places:
        tables["prompts"].index_add_(0, torch.tensor(places, device=rows.device), columns(rows, *_BY_PROMPT))
    marks = [getattr(row, "is_off_policy", None) for row in requests]
    if "sources" in tables and marks and None not in marks:
        values_B3 = torch.stack([counted_B, weight_B, divergence_B], dim=1)
        tables["sources"].index_add_(0, torch.tensor(marks, device=rows.device).long(), values_B3)
    if "selection" in tables and (candidates_B := one.batch.get(CANDIDATES)) is not None:
        sums_2 = torch.stack([tokens_B, candidates_B.to(rows)]).mul(counted_B).sum(1)
        tables["selection"].add_(torch.cat([sums_2, rows.new_zeros(2) if one.scored is None else one.scored.to(rows)]))


def spread(sums_R3: Tensor, number: int) -> dict[str, float]:
    """Mean over prompts of the standard deviation among their completions; empty if no prompt has two that count.

    `sums_R3` are the statistics `_BY_PROMPT`; completions of a prompt are adjacent.
    """
    # Deviations are those of TRL's GRPO for rewards: n - 1.
    weight_Gn, divergence_Gn, tokens_Gn = sums_R3.double().view(-1, number, len(_BY_PROMPT)).unbind(-1)
    counted_Gn = weight_Gn > 0
    several_G = counted_Gn.sum(1) > 1
    if not several_G.any():
        return {}
    mean_Gn = torch.where(counted_Gn, divergence_Gn / weight_Gn, torch.nan)
    return {
        "group/divergence_std": _deviation(mean_Gn[several_G]),
        "group/length_std": _deviation(torch.where(counted_Gn, tokens_Gn, torch.nan)[several_G]),
    }


def _deviation(values_Gn: Tensor) -> float:
    """Mean over prompts of the standard deviation of their values that are not NaN; each prompt has at least two."""
    squares_Gn = (values_Gn - values_Gn.nanmean(1, keepdim=True)).square()
    freedom_G = (~values_Gn.isnan()).sum(1) - 1
    return float((squares_Gn.nansum(1) / freedom_G).sqrt().mean())
