"""Compares the student with what it was before training: a target beyond the teacher, or an anchor.

B rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, final

from trl_opsd.losses import ReverseKL
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.monitor.metrics import WEIGHTED, Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import not_by_bytes, together, undivided, unless
from trl_opsd.options.table import NAME, SET, Need, Option, above, at_least, shown
from trl_opsd.types import Rollout

_EXTRAPOLATES = Need("`extrapolation` is 1", lambda now: now.extrapolation != 1)
_A_THIRD = "but only two models are compared by bytes, and the initial one is a third"


@with_help
@dataclass
class OriginOptions:
    extrapolation: Annotated[
        float,
        Option(
            at_least(0),
            resumed=True,
            words="extrapolated {:g} times from the student as it was passed",
            also="lambda_vals",
        ),
    ] = 1.0
    """The target is the initial student's log-probabilities plus this factor times the teacher's minus the initial
    student's; above 1 it lies beyond the teacher (G-OPD, arXiv 2602.12125)."""
    extrapolation_reference: Annotated[
        str | None,
        Option(NAME | None, (_EXTRAPOLATES,), resumed=True, words="with the teacher {!r} in place of that student"),
    ] = None
    """Name of the teacher to use as reference for `extrapolation` instead of the initial student: in G-OPD, the model
    that the teacher was trained from. Rows must name other teachers."""
    anchor_weight: Annotated[
        float,
        Option(
            at_least(0),
            resumed=True,
            words="plus {:g} times the divergence from the student as it was passed",
            also="ref_kl_coef kl_coef",
        ),
    ] = 0.0
    """Weight of KL(student‖initial student), added to the divergence from the teacher (the reference KL of other
    trainers; SDFT, arXiv 2601.19897)."""

    @property
    def reads_origin(self) -> bool:
        """Whether the loss uses the student as it was passed."""
        return self.extrapolation != 1 or self.anchor_weight > 0


@final
class Origin(Method):
    """Has the student as it was passed, or the teacher that stands in its place, read what the student has read."""

    reads = ("origin",)
    rules = (
        undivided(lambda args: args.extrapolation != 1 and shown("extrapolation", args.extrapolation)),
        undivided(lambda args: args.anchor_weight and shown("anchor_weight", args.anchor_weight)),
        not_by_bytes("extrapolation", unless(1.0), _A_THIRD),
        not_by_bytes("anchor_weight", above(0), _A_THIRD),
        together(
            ": an anchor is the student as it was passed, and there is one reference alone: remove one of them.",
            extrapolation_reference=SET,
            anchor_weight=above(0),
        ),
    )
    metrics: ClassVar = {
        "anchor/mean": Metric(
            "nats",
            "What the anchor adds to the divergence, per token.",
            Logs(WEIGHTED, "`anchor_weight` above 0"),
            "anchored / weight",
        ),
    }

    @classmethod
    def of(cls, now: Any) -> Origin | None:
        return cls() if now.args.reads_origin else None

    def references(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Mapping[str, Rollout]:
        if (name := self.host.args.extrapolation_reference) is not None:
            self.host.teaching.prompts.check_fit(rows, rollout.prompt_lists(), rollout, name)
        return {"origin": rollout}

    def objective(self, objective: Objective) -> Objective:
        args = self.host.args
        # The anchor is of whole distributions, whatever `top_k_teacher`.
        return replace(
            objective,
            extrapolation=args.extrapolation,
            anchor_weight=args.anchor_weight,
            anchor=ReverseKL() if args.anchor_weight else None,
        )
