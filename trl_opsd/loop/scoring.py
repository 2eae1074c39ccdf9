"""Has the teacher score a generation batch once, before it is shuffled and split, and weighs its tokens.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd.methods.order import checked_weights
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.parallel.precision import autocast
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import check_targets, kept_by_row

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)


class Scorer:
    """Adds to a generation batch what the loss needs besides tokens: targets and weights."""

    def __init__(self, host: OPSDTrainer) -> None:
        self._host, self._has_warned = host, False

    def score(self, batch: Mapping[str, Any], rows: Sequence[BatchRow]) -> dict[str, Any]:
        """What the loss needs besides TRL's keys."""
        host, name = self._host, type(self._host).__name__
        versions = {name: one._version for name, one in batch.items() if isinstance(one, Tensor)}
        rollout = Rollout.unpack(dict(batch))
        images = images_of(rows)
        rollout = replace(rollout, lengths=rollout.measured(), images=images)
        rollout = replace(rollout, weights=host.methods.select(rollout.weights, rollout, rows))
        counted = rollout.weights.clone()  # `weigh` may change them in place
        with preserved_mode(host.model):
            with host.phase("teach"), autocast(host.accelerator):
                targets = host.teach(rollout, rows)
            check_targets(targets, rollout, f"{name}.teach")
            if missing := host.methods.reads - set(targets.beside):
                raise ValueError(
                    f"`{name}.teach` returned targets without those of {sorted(missing)}, which the objective needs: "
                    "change those of `super().teach(rollout, rows)`."
                )
            weights = host.weigh(rollout, rows, targets)
        # A `Rollout` is frozen, but not what its tensors hold: with a mask that is changed in place the student would
        # attend to other tokens than the teacher did.
        if versions != {name: batch[name]._version for name in versions}:
            raise ValueError(
                f"`{name}.teach`, `{name}.weigh`, or the teacher changed the tokens or masks of the rollout in place: "
                "change a copy. To exclude a token from the loss, return a weight of 0 for it from `weigh`."
            )
        rollout = replace(rollout, weights=counted)
        weights = host.methods.weighed(checked_weights(weights, counted, "weigh"), rollout, rows)
        found = {
            **kept_by_row(targets, counted).pack(),
            "loss_weights": weights,
            "rows": list(rows),
            **({} if images is None else {"row_images": list(images)}),
            "lengths": list(replace(rollout, weights=weights).ended().lengths or ()),
        }
        if host.reads_logprobs:
            found.update(self._logprobs(rollout, rows))
        return found

    def warn_if_unscored(self, scored: Tensor | None) -> None:
        """Warns once if `compare` did not return the `scored` of a late selection."""
        if scored is not None or self._has_warned:
            return
        objective = self._host.current_objective
        if objective.selection is not None:
            self._has_warned = True
            logger.warning(
                f"`token_selection={objective.selection.criterion!r}` was not applied: `super().compare` applies it, "
                f"but `{type(self._host).__name__}.compare` did not return its result (change that with "
                "`dataclasses.replace`)."
            )

    def _logprobs(self, rollout: Rollout, rows: Sequence[BatchRow]) -> dict[str, Tensor]:
        """What tokens were sampled with, [B, C], NaN in rows where it is not known; empty without any. Collective.

        A loss that weighs tokens by it gets those of all rows of all processes, or none.
        """
        logprobs_BC, known = torch.zeros(rollout.completion_ids.shape), 0
        for number, (row, ids) in enumerate(zip(rows, rollout.completion_lists(), strict=True)):
            # Where a subclass has changed a completion since, what its tokens were sampled with is not known.
            if row.logprobs is not None and row.logprobs[0] == ids:
                known += 1
                logprobs_BC[number, : len(row.logprobs[1])] = torch.tensor(row.logprobs[1])
            else:
                logprobs_BC[number] = torch.nan
        device, weighs = self._host.accelerator.device, self._host.learns_from_draws
        enough = torch.tensor([known == len(rows) if weighs else known > 0], device=device)
        of_all = self._host.accelerator.gather(enough)
        return {"logprobs": logprobs_BC.to(device)} if (of_all.all() if weighs else of_all.any()) else {}
