"""Restricts a training to a part of the tokens of each row, and logs which part.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.losses.token_selection import Selection
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import LossParts, Rollout

__all__ = ["Selecting"]

logger = get_logger(__name__)

_WEIGHT, _TOKENS = (LossParts.ROW_NAMES.index(name) for name in ("weight", "tokens"))
_CANDIDATES = "selected_from"
"""Key of a batch: [B], number of tokens of each row to select from."""


class Selecting(DistillationTrainer):
    """A trainer that may train on some tokens of each row only; evaluations are of all tokens."""

    args: OPSDConfig
    record: Callable[[str, float], None]
    row_group: Any
    _has_warned = False
    _loss_scored: Tensor | None = None
    """`scored` of the last [`~types.LossParts`]."""
    _kept_sums: Tensor | None = None
    """[4], of this step: tokens selected, candidates, tokens with a score, and the sum of their scores in nats."""

    @property
    def _selection(self) -> Selection | None:
        return self.args.build_selection() if self.model.training else None

    @property
    def _late_selection(self) -> Selection | None:
        """The selection of a training, if its criterion needs logits."""
        selection = self._selection
        return selection if selection is not None and selection.is_late else None

    def select_early(self, rollout: Rollout, rows: Sequence[Any]) -> Rollout:
        """The rollout with weight 0 for tokens that an early criterion drops, so that the teacher stops at the last one
        kept.

        `"random"` depends on `seed`, the step, and the place of a row among those of all processes.
        """
        selection = self._selection
        if selection is None or selection.is_late:
            return rollout
        places = [getattr(row, "place", None) for row in rows]
        # Rows of a batch that no dataset gave have no place: their number in it stands in.
        seeds = [
            derived_seed(self.args.seed, self.state.global_step, number if place is None else place, _SALT)
            for number, place in enumerate(places)
        ]
        return replace(rollout, weights=selection.chosen(rollout.weights, seeds))

    def select_late(self, weights_BC: Tensor, written: Rollout) -> dict[str, Tensor]:
        """The weights of `weigh` as keys of a batch; a late criterion scales them to the tokens to be selected."""
        selection = self._selection
        if selection is None:
            return {"loss_weights": weights_BC}
        # The denominator of the step is known before the logits that a late criterion needs.
        counts_BC = weights_BC != 0 if selection.is_late else written.counts
        weights_BC = selection.thinned(weights_BC) if selection.is_late else weights_BC
        return {"loss_weights": weights_BC, _CANDIDATES: counts_BC.sum(1)}

    def note_selection(self, batch: Mapping[str, Any], rows: Tensor) -> None:
        """Adds the selection of a micro-batch to the sums of the step; not where processes share rows."""
        scored, self._loss_scored = self._loss_scored, None
        if scored is None and (selection := self._late_selection) is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"`token_selection={selection.criterion!r}` was not applied: it is by `super().compare`, and "
                f"`{type(self).__name__}.compare` did not return what that returns (`dataclasses.replace` changes it)."
            )
        if (candidates_B := batch.get(_CANDIDATES)) is None or self.row_group is not None:
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


_SALT = 1
"""Separates the seeds of token selection from those of `lmbda`."""
