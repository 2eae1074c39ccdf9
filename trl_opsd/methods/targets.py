"""Moves the target away from a contrast or from the initial student, or anchors the student to what it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from trl_opsd._compat.values import NotNegative, Positive
from trl_opsd.losses import ReverseKL
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.base import Method
from trl_opsd.types.metrics import WEIGHTED, Logs, Metric


@final
@dataclass
class Contrast(Method):
    """Moves the target away from what the teacher predicts with the column `contrast_context` or `contrast_prompt`:
    log-probabilities plus `weight` times their difference (arXiv 2606.11709, arXiv 2607.02234).

    Args:
        weight (`float`): Factor of the difference.
        clip (`float`, *optional*): Soft bound `c` of the difference, in nats: `c * tanh(difference / c)`.
    """

    weight: Positive
    clip: Positive | None = None

    reads = ("contrast",)
    by_token = needs_whole = moves_target = True

    def objective(self, objective: Objective) -> Objective:
        return replace(objective, contrast=(self.weight, self.clip))


@final
@dataclass
class Extrapolation(Method):
    """Moves the target beyond the teacher: the log-probabilities of the initial student, plus `factor` times the
    difference of the teacher's to them (G-OPD, arXiv 2602.12125).

    Args:
        factor (`float`): 1 is the teacher, above 1 is beyond it, 0 is the initial student.
    """

    factor: NotNegative

    reads = ("origin",)
    by_token = needs_whole = moves_target = True

    def objective(self, objective: Objective) -> Objective:
        return replace(objective, extrapolation=self.factor)


@final
@dataclass
class Anchor(Method):
    """Adds the reverse KL from the student to the initial student (the reference KL of other trainers; SDFT, arXiv
    2601.19897).

    Args:
        weight (`float`): Factor of this KL; the divergence from the teacher has the factor 1.
    """

    weight: Positive

    reads = ("origin",)
    by_token = True
    metrics: ClassVar = {
        "anchor/mean": Metric(
            "nats",
            "What the anchor adds to the divergence, per token.",
            Logs(WEIGHTED, "the method `anchor`"),
            "anchored / weight",
        ),
    }

    def objective(self, objective: Objective) -> Objective:
        # The anchor is of whole distributions, whatever `top_k_teacher`.
        return replace(objective, anchor_weight=self.weight, anchor=ReverseKL())
