"""Restricts a training to a part of the tokens of each row, before the teacher scores or in its loss.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.loop.step_stats import CANDIDATES
from trl_opsd.losses.token_selection import Selection
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import Rollout

__all__ = ["Selecting"]

logger = get_logger(__name__)


class Selecting(DistillationTrainer):
    """A trainer that may train on some tokens of each row only; evaluations are of all tokens."""

    args: OPSDConfig
    _has_warned = False
    _loss_scored: Tensor | None = None
    """`scored` of the last [`~types.LossParts`]."""

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
        return {"loss_weights": weights_BC, CANDIDATES: counts_BC.sum(1)}

    def warn_if_unscored(self, scored: Tensor | None) -> None:
        """Warns once if `compare` did not return the `scored` of a late selection."""
        if scored is None and (selection := self._late_selection) is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"`token_selection={selection.criterion!r}` was not applied: it is by `super().compare`, and "
                f"`{type(self).__name__}.compare` did not return what that returns (`dataclasses.replace` changes it)."
            )


_SALT = 1
"""Separates the seeds of token selection from those of `lmbda`."""
