"""Moves the target away from what the teacher says in another context, that of a contrast.

B rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, final

from trl_opsd.losses.objective import Objective
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import not_by_bytes, undivided
from trl_opsd.options.table import Need, Option, above, at_least, shown
from trl_opsd.types import Rollout

_CONTRASTS = Need("`contrast_weight` is 0", lambda now: now.contrast_weight)


@with_help
@dataclass
class ContrastOptions:
    contrast_weight: Annotated[
        float,
        Option(at_least(0), resumed=True, words="moved {:g} times away from a contrast", also="contrast_alpha"),
    ] = 0.0
    """How far the target moves away from the teacher's distribution in the context of the column `contrast_context` or
    `contrast_prompt`: the factor of the difference of log-probabilities that the target adds (arXiv 2606.11709, arXiv
    2607.02234)."""
    contrast_clip: Annotated[float | None, Option(above(0) | None, (_CONTRASTS,), resumed=_CONTRASTS)] = None
    """Soft bound, in nats, of the difference that `contrast_weight` multiplies: `c * tanh(difference / c)`."""


@final
class Contrast(Method):
    """Has the teacher read each completion in its contrast, too; `data/prompts.py` makes that of the columns."""

    reads = ("contrast",)
    rules = (
        undivided(lambda args: args.contrast_weight and shown("contrast_weight", args.contrast_weight)),
        not_by_bytes(
            "contrast_weight", above(0), "but only two distributions are compared by bytes, and a contrast is a third"
        ),
    )

    @classmethod
    def of(cls, now: Any) -> Contrast | None:
        return cls() if now.contrast_weight > 0 else None

    def references(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Mapping[str, Rollout]:
        return {"contrast": self.host.teaching.prompts.contrasts(rollout, rows)}

    def objective(self, objective: Objective) -> Objective:
        args = self.host.args
        return replace(objective, contrast=(args.contrast_weight, args.contrast_clip))
