"""Separates the sums of a loss by teacher, where there are several.

B rows · T teachers
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Trainer

from trl_opsd.types import LossParts

__all__ = ["ByTeacher"]

_APART = ("weight", "divergence", "teacher_entropy")
"""The sums that are also kept by teacher."""
_COLUMNS = [LossParts.ROW_NAMES.index(name) for name in _APART]


class ByTeacher(Trainer):
    """A trainer whose rows may have several teachers."""

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Names of the teachers, in the order of their numbers; empty if there is one."""
        return ()

    def with_teachers(self, rows: Tensor, teacher: Tensor | None) -> Tensor:
        """Adds to the sums of each row, [B, columns], a copy in its teacher's columns; does not wait for the device."""
        number = len(self.teacher_names)
        if not number:
            return rows
        # `teacher` is in host memory: the comparison runs there, and its result is copied without waiting.
        is_its_BT = torch.zeros(len(rows), number) if teacher is None else teacher[:, None] == torch.arange(number)
        mine_B3T = rows[:, _COLUMNS, None] * is_its_BT[:, None].to(rows.device, rows.dtype, non_blocking=True)
        return torch.cat([rows, mine_B3T.flatten(1)], dim=1)

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """The sums of [`with_teachers`] by name; those of a teacher are `"divergence/<its name>"`."""
        theirs = [f"{name}/{teacher}" for name in _APART for teacher in self.teacher_names]
        return dict(zip((*LossParts.ROW_NAMES, *theirs), sums, strict=True))
