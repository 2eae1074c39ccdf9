"""Completions of the dataset or the teacher among those of the student: likelihood on them, and their share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd._compat.values import NotNegative
from trl_opsd.methods.base import Method, Part
from trl_opsd.methods.rows import BatchRow
from trl_opsd.types.loss import columns
from trl_opsd.types.metrics import STEPS, Logs, Metric

_MIXED = Logs(STEPS, "`lmbda` below 1; not where processes share rows", evaluated=False)
_MIXED_SOME = Logs(f"{STEPS} that had some", _MIXED.appears, evaluated=False)


@final
@dataclass
class OffPolicy(Method):
    """Adds `-log p` of completions that the student has not generated, with `lmbda` below 1, and logs both kinds apart.
    A trainer has one unasked.

    Args:
        nll_weight (`float`, *optional*, defaults to 0): Weight of `-log p` of the student's tokens in such a
            completion, beside the divergence.
    """

    nll_weight: NotNegative = 0.0

    whole_rows = False

    @property
    def adds_nll(self) -> bool:  # type: ignore[override]
        """Whether it adds to the divergence."""
        return self.nll_weight > 0

    metrics: ClassVar = {
        "off_policy/share": Metric("1", "Share of rows in the loss that the student did not generate.", _MIXED),
        "off_policy/divergence": Metric("nats", "`divergence/mean` of off-policy rows.", _MIXED_SOME),
        "on_policy/divergence": Metric("nats", "`divergence/mean` of on-policy rows.", _MIXED_SOME),
    }

    def before(self, rows: Sequence[BatchRow]) -> None:
        for row in rows:
            row.nll_weight += self.nll_weight * row.is_off_policy

    def tally(self, part: Part) -> Tensor:
        """[2, 3]: rows that count, their weight and divergence, of the student's and of the others."""
        marks_B = torch.tensor([row.is_off_policy for row in part.rows]).long()
        weight_B, divergence_B = columns(part.sums, "weight", "divergence").unbind(1)
        values_B3 = torch.stack([(weight_B > 0).to(weight_B.dtype), weight_B, divergence_B], dim=1)
        return part.sums.new_zeros(2, 3).index_add_(0, marks_B.to(weight_B.device, non_blocking=True), values_B3)

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        if tally is None:
            return
        (of_student, *student), (of_others, *others) = tally.tolist()
        if of_student + of_others:
            self.host.record("off_policy/share", of_others / (of_student + of_others))
        if of_student:
            self.host.record("on_policy/divergence", student[1] / student[0])
        if of_others:
            self.host.record("off_policy/divergence", others[1] / others[0])
