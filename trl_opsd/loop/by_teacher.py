"""Keeps the sums of a loss apart by teacher, where there are several.

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
"""The sums of which each teacher has its own."""
_COLUMNS = [LossParts.ROW_NAMES.index(name) for name in _APART]


class ByTeacher(Trainer):
    """A trainer whose rows may have several teachers."""

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """Names of the teachers, in the order of their numbers; empty if there is one."""
        return ()

    def with_teachers(self, rows: Tensor, teacher: Tensor | None) -> Tensor:
        """The sums of each row, and once more in the columns of its teacher. Waits for no device.

        Args:
            rows (`torch.Tensor`):
                `rows` of the [`~types.LossParts`], [B, columns].
            teacher (`torch.Tensor`, *optional*):
                [B], in host memory, the number of the teacher of each row; `None` where it is not known.
        """
        number = len(self.teacher_names)
        if not number:
            return rows
        is_its_BT = torch.zeros(len(rows), number) if teacher is None else teacher[:, None] == torch.arange(number)
        mine_B3T = rows[:, _COLUMNS, None] * is_its_BT[:, None].to(rows.device, rows.dtype, non_blocking=True)
        return torch.cat([rows, mine_B3T.flatten(1)], dim=1)

    def named(self, sums: Sequence[float]) -> dict[str, float]:
        """The sums over rows of [`with_teachers`] by their names: of a teacher, `"divergence/<its name>"`."""
        theirs = [f"{name}/{teacher}" for name in _APART for teacher in self.teacher_names]
        return dict(zip((*LossParts.ROW_NAMES, *theirs), sums, strict=True))
