"""Trains on some tokens of each row: the first, random ones, or those that score highest.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, final

import torch
from numpy import ndarray
from torch import Tensor

from trl_opsd.losses.objective import Objective
from trl_opsd.losses.token_selection import EARLY, LATE, Selection
from trl_opsd.methods.base import Method, Part
from trl_opsd.methods.rows import BatchRow
from trl_opsd.monitor.metrics import STEPS, Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import not_by_bytes, undivided
from trl_opsd.options.table import Need, Option, one_of, share
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import Rollout
from trl_opsd.types.loss import columns

_SALT = 1
"""Separates the seeds of token selection from those of `lmbda`."""
_SELECTION = Need("`token_selection` is not set", lambda now: now.token_selection is not None)
_FRACTION = Need("`token_fraction` is 1", lambda now: now.token_fraction != 1)


@with_help
@dataclass
class SelectionOptions:
    token_selection: Annotated[str | None, Option(one_of(None, *EARLY, *LATE), (_FRACTION,), resumed=True)] = None
    """In training, which tokens of each row count in the loss, a share of `token_fraction`: the first, random ones, or
    those with the highest entropy, divergence or surprise; see `docs/objectives.md`. When
    `None`, all."""
    token_fraction: Annotated[float, Option(share(), (_SELECTION,), resumed=True)] = 1.0
    """Share of the tokens of a row that `token_selection` keeps, rounded up to whole tokens."""

    def build_selection(self) -> Selection | None:
        """Which tokens of a row count in the loss; `None` if all do."""
        if self.teacher_control == "constant":  # type: ignore[attr-defined]  # which has tokens of its own
            return Selection("student_surprise", 0.2)
        if self.token_selection is None or self.token_fraction == 1:
            return None
        return Selection(self.token_selection, self.token_fraction)


@final
class TokenSelection(Method):
    """Selects tokens before the teacher reads them, or, by a criterion that needs logits, in the loss."""

    rules = (
        not_by_bytes("token_selection", one_of(*LATE), "which ranks tokens by distributions over tokens"),
        undivided(
            lambda args: args.token_selection in LATE,
            "with `token_selection={0.args.token_selection!r}`: the tokens of a row are split over processes, and none "
            "has all scores: set 'prefix' or 'random', or remove `sp_size`.",
        ),
    )
    metrics: ClassVar = {
        "selection/share": Metric(
            "1",
            "Share of tokens that are trained on; all other metrics of a training are over these tokens.",
            Logs(STEPS, "`token_selection`; not where processes share rows", evaluated=False),
        ),
        "selection/score": Metric(
            "nats",
            "Mean over all tokens of the score that selects tokens: the student's entropy, or the divergence.",
            Logs(STEPS, "`token_selection` by one of these", evaluated=False),
        ),
    }

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    @classmethod
    def of(cls, now: Any) -> TokenSelection | None:
        selection = now.args.build_selection()
        return None if selection is None else cls(selection)

    def select(self, weights: Tensor, rollout: Rollout, rows: Sequence[BatchRow]) -> Tensor:
        if self.selection.is_late:
            return weights
        # Rows of a batch that no dataset gave have no place: their number in it stands in.
        places = [number if row.place is None else row.place for number, row in enumerate(rows)]
        seed, step = self.host.args.seed, self.host.state.global_step
        return self.selection.chosen(weights, [derived_seed(seed, step, place, _SALT) for place in places])

    def weighed(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        # The denominator of the step is known before the logits that a late criterion needs.
        return self.selection.thinned(weights) if self._is_late else weights

    def objective(self, objective: Objective) -> Objective:
        return replace(objective, selection=self.selection) if self._is_late else objective

    @property
    def _is_late(self) -> bool:
        return self.selection.is_late and self.host.model.training

    def tally(self, part: Part) -> Tensor:
        """[4]: tokens that were selected, tokens to select from, tokens that were scored, and their scores."""
        weight_B, tokens_B = columns(part.sums, "weight", "tokens").unbind(1)
        counted_B = (weight_B > 0).to(part.sums.dtype)  # a row repeated only to keep collectives matched has no weight
        if self.selection.is_late:
            candidates_B = (part.batch["loss_weights"] != 0).sum(1)
        else:
            candidates_B = Rollout.unpack(part.batch).generated.sum(1)
        sums_2 = torch.stack([tokens_B, candidates_B.to(part.sums)]).mul(counted_B).sum(1)
        return torch.cat([sums_2, sums_2.new_zeros(2) if part.scored is None else part.scored.to(sums_2)])

    def stepped(self, sums: Mapping[str, float], tally: ndarray | None) -> None:
        if tally is None:
            return
        selected, candidates, scored, score = tally.tolist()
        if candidates:
            self.host.record("selection/share", selected / candidates)
        if scored:
            self.host.record("selection/score", score / scored)
