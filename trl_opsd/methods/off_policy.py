"""Completions of the dataset or the teacher among those of the student: likelihood on them, and their share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, final

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd.methods.base import Method, Part
from trl_opsd.methods.rows import BatchRow
from trl_opsd.monitor.metrics import STEPS, Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.table import OFF_POLICY, Option, at_least
from trl_opsd.types.loss import columns

_MIXED = Logs(STEPS, "`lmbda` below 1; not where processes share rows", evaluated=False)
_MIXED_SOME = Logs(f"{STEPS} that had some", _MIXED.appears, evaluated=False)


@with_help
@dataclass
class OffPolicyOptions:
    sft_weight: Annotated[
        float,
        Option(
            at_least(0),
            (OFF_POLICY,),
            resumed=True,
            words="plus {:g} times -log p of completions of others",
            also="sft_alpha sft_coef",
        ),
    ] = 0.0
    """Weight of `-log p` of the student beside the divergence, for completions that the student did not generate."""


@final
class OffPolicy(Method):
    """Adds the likelihood of completions that the student has not generated, and logs both kinds apart."""

    metrics: ClassVar = {
        "off_policy/share": Metric("1", "Share of rows in the loss that the student did not generate.", _MIXED),
        "off_policy/divergence": Metric("nats", "`divergence/mean` of off-policy rows.", _MIXED_SOME),
        "on_policy/divergence": Metric("nats", "`divergence/mean` of on-policy rows.", _MIXED_SOME),
    }

    @classmethod
    def of(cls, now: Any) -> OffPolicy | None:
        return cls() if now.lmbda < 1 else None

    def before(self, rows: Sequence[BatchRow]) -> None:
        for row in rows:
            row.pull += self.host.args.sft_weight * bool(row.is_off_policy)

    def tally(self, part: Part) -> Tensor:
        """[2, 3]: rows that count, their weight and divergence, of the student's and of the others."""
        sums_23 = part.sums.new_zeros(2, 3)
        marks = [row.is_off_policy for row in part.rows]
        if marks and None not in marks:  # rows that no dataset gave have no mark
            weight_B, divergence_B = columns(part.sums, "weight", "divergence").unbind(1)
            values_B3 = torch.stack([(weight_B > 0).to(weight_B.dtype), weight_B, divergence_B], dim=1)
            sums_23.index_add_(0, torch.tensor(marks).long().to(weight_B.device, non_blocking=True), values_B3)
        return sums_23

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
