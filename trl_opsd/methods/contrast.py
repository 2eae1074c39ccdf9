"""Moves the target away from what the teacher says in another context, that of a contrast.

B rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from trl_opsd._compat.values import Positive
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.base import Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.types import Rollout


@final
@dataclass
class Contrast(Method):
    """Moves the target from the teacher's distribution away from the one in the context of a column `contrast_context`
    or `contrast_prompt`: log-probabilities plus `weight` times their difference (arXiv 2606.11709, arXiv 2607.02234).

    Args:
        weight (`float`): Factor of the difference.
        clip (`float`, *optional*): Soft bound `c` of the difference, in nats: `c * tanh(difference / c)`.
    """

    weight: Positive
    clip: Positive | None = None

    reads = ("contrast",)
    by_token = needs_whole = moves_target = True

    @property
    def words(self) -> str:  # type: ignore[override]
        return f"moved {self.weight:g} times away from a contrast"

    def references(self, rollout: Rollout, rows: Sequence[BatchRow]) -> Mapping[str, Rollout]:
        return {"contrast": self.host.teaching.prompts.contrasts(rollout, rows)}

    def objective(self, objective: Objective) -> Objective:
        return replace(objective, contrast=(self.weight, self.clip))
