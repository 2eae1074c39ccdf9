"""The teacher's hidden states for the tokens of a rollout.

B rows · C completion tokens · n tokens of a row that may count · H hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTargets:
    """The targets of the tokens of one row that may count, and of no other token."""

    hidden: Tensor
    """[n, H_t], in the width and dtype of the row's teacher, on the device that keeps targets."""
    places: Tensor
    """[n], int64, in host memory: positions of these tokens in the completion, ascending."""

    def cut(self, tokens: int) -> RowTargets:
        """Those of the first completion tokens."""
        kept = int(torch.searchsorted(self.places, tokens))
        return self if kept == len(self.places) else RowTargets(self.hidden[:kept], self.places[:kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """The teacher's targets for a rollout, small enough to keep for a whole generation batch.

    `TeacherTargets(hidden=...)` has a state for each token. Teachers of this package keep only those of tokens that may
    count, in `rows`; `hidden` is then a copy, made on first access, which from then on replaces `rows`.
    """

    hidden: Tensor = field(repr=False)  # a repr would create it
    """[B, C, H_t], the teacher's last hidden state at the position that *predicts* each completion token.

    Made from `rows`, it is 0 at tokens that cannot count, and as wide as the widest teacher of the batch, padded with
    zeros."""
    teacher: Tensor | None = None
    """[B], in host memory, the number of the teacher that scored the row; `None` where there is only one."""
    rows: tuple[RowTargets, ...] | None = field(default=None, init=False, repr=False)
    """The targets row by row, or `None` where `hidden` holds them."""
    tokens: int = field(default=0, init=False, repr=False)
    """C, where `rows` hold the targets."""

    def cut(self, tokens: int) -> TeacherTargets:
        """The targets of the first completion tokens, for a batch in which no later token counts."""
        if self.rows is None:
            return replace(self, hidden=self.hidden[:, :tokens])
        return TeacherTargets.by_row([row.cut(tokens) for row in self.rows], tokens, self.teacher)

    @classmethod
    def by_row(cls, rows: Iterable[RowTargets], tokens: int, teacher: Tensor | None = None) -> TeacherTargets:
        """Targets of B rows of C = `tokens` completion tokens."""
        # Without `__init__` the slot `hidden` stays empty, so that `__getattr__` fills it on first access.
        self = object.__new__(cls)
        for name, value in {"rows": tuple(rows), "tokens": tokens, "teacher": teacher}.items():
            object.__setattr__(self, name, value)
        return self

    def __getattr__(self, name: str) -> Tensor:
        # Reached only while the slot is empty. The caller may write to the states, so they replace the rows.
        if name != "hidden":
            raise AttributeError(f"`TeacherTargets` has no attribute `{name}`.")
        assert self.rows, "a rollout has rows"
        wide = max((row.hidden for row in self.rows), key=lambda states: states.size(1))
        dtype = reduce(torch.promote_types, (row.hidden.dtype for row in self.rows))
        hidden_BCH = wide.new_zeros(len(self.rows), self.tokens, wide.size(1), dtype=dtype)
        for to_CH, row in zip(hidden_BCH, self.rows, strict=True):
            to_CH[row.places.to(to_CH.device), : row.hidden.size(1)] = row.hidden.to(to_CH)
        object.__setattr__(self, "hidden", hidden_BCH)
        object.__setattr__(self, "rows", None)
        return hidden_BCH

    def of(self, row: int, places_n: Tensor) -> Tensor:
        """[n, H_t]: the states at these positions of a row, which are ascending, in host memory, and may count."""
        if self.rows is None:
            return self.hidden[row].index_select(0, places_n.to(self.hidden.device))
        # Kept places are ascending, so a binary search finds the indices.
        kept = self.rows[row]
        return kept.hidden.index_select(0, torch.searchsorted(kept.places, places_n).to(kept.hidden.device))

    def pack(self) -> dict[str, Any]:
        """The row-aligned values that are dealt to micro-batches, of targets kept by row."""
        assert self.rows is not None, "only `rows` do not depend on the longest completion of a batch"
        packed = {"teacher_rows": list(self.rows)}
        return packed if self.teacher is None else {**packed, "teacher_number": self.teacher}

    @classmethod
    def unpack(cls, batch: Mapping[str, Any]) -> TeacherTargets:
        """The inverse of [`~TeacherTargets.pack`], on any subset of the rows."""
        return cls.by_row(batch["teacher_rows"], batch["completion_ids"].size(1), batch.get("teacher_number"))
