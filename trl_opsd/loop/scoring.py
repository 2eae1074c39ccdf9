"""Has the teacher score exactly the tokens that are trained on, also in a batch built or changed elsewhere.

TRL's teacher scores each micro-batch in its loss; ours scores a generation batch once, before it is shuffled and split.

B rows · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd.loop.overrides import may_change_batches
from trl_opsd.loop.trainer_host import TrainerHost
from trl_opsd.methods.order import checked_weights
from trl_opsd.methods.rows import BatchRow
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.parallel.precision import autocast
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import check_targets, kept_by_row

logger = get_logger(__name__)


class Scorer:
    """Has the teacher score a generation batch, weighs its tokens, and scores changed ones anew before their loss."""

    def __init__(self, host: TrainerHost) -> None:
        self._host, self._has_warned = host, False

    def score(self, batch: Mapping[str, Any], rows: Sequence[BatchRow]) -> dict[str, Any]:
        """What the loss needs besides TRL's keys: targets, weights, and a digest of the tokens they belong to."""
        host, name = self._host, type(self._host).__name__
        digest = _digest(batch)
        rollout = _generated(batch)
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
        if not torch.equal(_digest(batch), digest):
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
            "scored": digest,
            "lengths": list(replace(rollout, weights=weights).ended().lengths or ()),
        }
        if host.reads_logprobs:
            found.update(self._logprobs(rollout, rows))
        return found

    def scored(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch, with targets and weights for its current tokens. Collective."""
        if not self._needs_scoring(batch):
            rows = batch.get("rows")  # which a subclass may have put there
            return batch if rows is None else {**batch, "rows": self._host.teaching.as_rows(rows)}
        # What other tokens were sampled with says nothing of these.
        batch = {name: value for name, value in batch.items() if name != "logprobs"}
        return {**batch, **self.score(batch, self._host.teaching.rows_of(batch, _generated(batch)))}

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

    def _needs_scoring(self, batch: Mapping[str, Any]) -> bool:
        if "scored" not in batch:
            return True
        if not may_change_batches(self._host):
            return False
        changed = torch.tensor([not torch.equal(batch["scored"], _digest(batch))], device=self._host.accelerator.device)
        # A teacher may be sharded over the processes, so all of them let it score, or none.
        return bool(self._host.accelerator.gather(changed).any())

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


def _generated(batch: Mapping[str, Any]) -> Rollout:
    """The tokens of a batch, with TRL's weights: 1 where the student generated one."""
    return Rollout.unpack({name: value for name, value in batch.items() if name not in ("loss_weights", "lengths")})


def _digest(batch: Mapping[str, Any]) -> Tensor:
    """[B], int64: changes for a row if one of its tokens or masks does."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    values_BN = torch.cat([batch[name].long() for name in names if batch.get(name) is not None], dim=1) + 1
    # Fixed random factors, so that a swap of two tokens changes the sum.
    factors_N = torch.randint(-(2**63), 2**63 - 1, (values_BN.size(1),), generator=torch.Generator().manual_seed(0))
    return (values_BN * factors_N.to(values_BN.device, non_blocking=True)).sum(1)  # wraps around
