"""Logs which part of the tokens of each row a training selects.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.loop.scoring import CANDIDATES, selection_of
from trl_opsd.types import LossParts

__all__ = ["Selecting"]

logger = get_logger(__name__)

_WEIGHT, _TOKENS = (LossParts.ROW_NAMES.index(name) for name in ("weight", "tokens"))


class Selecting(DistillationTrainer):
    """A trainer that logs which tokens it has selected."""

    args: OPSDConfig
    record: Callable[[str, float], None]
    row_group: Any
    _has_warned = False
    _loss_scored: Tensor | None = None
    """`scored` of the last [`~types.LossParts`]."""
    _kept_sums: Tensor | None = None
    """[4], of this step: tokens selected, candidates, tokens with a score, and the sum of their scores in nats."""

    def note_selection(self, batch: Mapping[str, Any], rows: Tensor) -> None:
        """Adds the selection of a micro-batch to the sums of the step; not where processes share rows."""
        scored, self._loss_scored = self._loss_scored, None
        selection = selection_of(self)
        if scored is None and selection is not None and selection.is_late and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"`token_selection={selection.criterion!r}` was not applied: it is by `super().compare`, and "
                f"`{type(self).__name__}.compare` did not return what that returns (`dataclasses.replace` changes it)."
            )
        if (candidates_B := batch.get(CANDIDATES)) is None or self.row_group is not None:
            return
        counted_B = rows[:, _WEIGHT] > 0  # a row repeated only to keep collectives matched has no weight
        sums_2 = torch.stack([rows[:, _TOKENS], candidates_B.to(rows)]).mul(counted_B).sum(1)
        sums_4 = torch.cat([sums_2, rows.new_zeros(2) if scored is None else scored.to(rows)])
        self._kept_sums = sums_4 if self._kept_sums is None else self._kept_sums + sums_4

    def record_selection(self) -> None:
        """Records the share of tokens that a step has trained on. Collective."""
        sums_4, self._kept_sums = self._kept_sums, None
        if self.args.build_selection() is None or self.row_group is not None:
            return
        if sums_4 is None:  # other processes may have some, and the reduction is collective
            sums_4 = torch.zeros(4, device=self.accelerator.device)
        kept, candidates, scored, score = self.accelerator.reduce(sums_4, "sum").tolist()
        if candidates:
            self.record("selection/share", kept / candidates)
        if scored:
            self.record("selection/score", score / scored)
