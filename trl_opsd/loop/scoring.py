"""Has the teacher score exactly the tokens that are trained on, also in a batch built or changed elsewhere.

TRL's teacher scores each micro-batch in its loss; ours scores a generation batch once, before it is shuffled and split.

B rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trl_opsd.data.teacher_prompts import Row
from trl_opsd.loop.dealing import Dealing
from trl_opsd.loop.logprobs import WithLogprobs
from trl_opsd.loop.selecting import Selecting
from trl_opsd.loop.verbs import Verbs
from trl_opsd.loop.weights import checked_weights
from trl_opsd.models.mode import preserved_mode
from trl_opsd.parallel.precision import autocast
from trl_opsd.types import Rollout
from trl_opsd.types.checks import check_targets
from trl_opsd.types.kept import kept_by_row

__all__ = ["Scoring"]


class Scoring(Verbs, WithLogprobs, Selecting, Dealing):
    """A trainer that knows which tokens its teacher has scored, and has changed ones scored before their loss."""

    phase: Callable[[str], AbstractContextManager[None]]

    def score(self, batch: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
        """What the loss needs besides TRL's keys: targets, weights, and a digest of the tokens they belong to."""
        written, name = _written(batch), type(self).__name__
        digest = _digest(written)
        rollout = self.select_early(replace(written, lengths=written.measured()), rows)
        counted = rollout.weights.clone()  # `weigh` may change them in place
        with preserved_mode(self.model):
            with self.phase("teach"), autocast(self.accelerator):
                targets = self.teach(rollout, rows)
            check_targets(targets, rollout, f"{name}.teach")
            _check_unchanged(batch, digest, f"`{name}.teach`, or the teacher that it asks,")
            weights = self.weigh(rollout, rows, targets)
        _check_unchanged(batch, digest, f"`{name}.weigh`")
        rollout = replace(rollout, weights=counted)
        weights = checked_weights(weights, rollout)
        return {
            **kept_by_row(targets, counted).pack(),
            **self.select_late(weights, _written(batch)),
            **self.logprobs_of(_written(batch), rows),
            "rows": list(rows),
            "scored": digest,
            "lengths": list(replace(rollout, weights=weights).ended().lengths or ()),
        }

    def scored(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch, with targets and weights for its current tokens. Collective."""
        if not self._needs_scoring(batch):
            return batch
        rows = batch.get("rows")
        # What other tokens were sampled with says nothing of these.
        batch = {name: value for name, value in batch.items() if name != "logprobs"}
        return {**batch, **self.score(batch, self.rows_of(_written(batch)) if rows is None else rows)}

    def _needs_scoring(self, batch: Mapping[str, Any]) -> bool:
        if "scored" not in batch:
            return True
        if not self.may_be_changed:
            return False
        now = _digest(_written(batch))
        changed = torch.tensor([not torch.equal(batch["scored"], now)], device=self.accelerator.device)
        # A teacher may be sharded over the processes, so all of them let it score, or none.
        return bool(self.accelerator.gather(changed).any())


def _written(batch: Mapping[str, Any]) -> Rollout:
    """The tokens of a batch, with TRL's weights: 1 where the student generated one."""
    return Rollout.unpack({name: value for name, value in batch.items() if name not in ("loss_weights", "lengths")})


def _check_unchanged(batch: Mapping[str, Any], digest: Tensor, what: str) -> None:
    """Rejects tokens and masks that were overwritten: the student would train on other ones than the teacher scored."""
    if not torch.equal(_digest(_written(batch)), digest):
        raise ValueError(
            f"{what} has changed the tokens or masks of the rollout in place, after others have read them: change a "
            "copy. A token is left out of the loss by a weight of 0, which `weigh` returns."
        )


def _digest(rollout: Rollout) -> Tensor:
    """[B], int64: changes for a row if one of its tokens or masks does."""
    parts = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask, rollout.counts)
    values_BN = torch.cat([part.long() for part in parts], dim=1) + 1
    # Fixed random factors, so that a swap of two tokens changes the sum.
    factors_N = torch.randint(-(2**63), 2**63 - 1, (values_BN.size(1),), generator=torch.Generator().manual_seed(0))
    return (values_BN * factors_N.to(values_BN.device)).sum(1)  # wraps around
