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

from trl_opsd.host import Host
from trl_opsd.loop.overrides import may_change_batches
from trl_opsd.loop.rows import BatchRow
from trl_opsd.loop.step_stats import CANDIDATES
from trl_opsd.loop.trainer_host import TrainerHost
from trl_opsd.losses.token_selection import Selection
from trl_opsd.models.backbone import preserved_mode
from trl_opsd.options.table import LARGEST_WEIGHT
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.rng import derived_seed
from trl_opsd.types import Rollout
from trl_opsd.types.rollout import images_of
from trl_opsd.types.targets import check_targets, kept_by_row

logger = get_logger(__name__)

_SALT = 1
"""Separates the seeds of token selection from those of `lmbda`."""


class Scorer:
    """Has the teacher score a generation batch, weighs its tokens, and scores changed ones anew before their loss."""

    def __init__(self, host: TrainerHost) -> None:
        self._host, self._has_warned = host, False

    def score(self, batch: Mapping[str, Any], rows: Sequence[BatchRow]) -> dict[str, Any]:
        """What the loss needs besides TRL's keys: targets, weights, and a digest of the tokens they belong to."""
        host, name = self._host, type(self._host).__name__
        digest, selection = _digest(batch), selection_of(host)
        rollout = _generated(batch)
        images, spoken = images_of(rows), rollout.counts
        rollout = replace(rollout, lengths=rollout.measured(), images=images)
        candidates_B = rollout.counts.sum(1)
        if selection is not None and not selection.is_late:
            rollout = replace(rollout, weights=selection.chosen(rollout.weights, self._seeds(rows)))
        counted = rollout.weights.clone()  # `weigh` may change them in place
        with preserved_mode(host.model):
            with host.phase("teach"), autocast(host.accelerator):
                targets = host.teach(rollout, rows)
            check_targets(targets, rollout, f"{name}.teach")
            if missing := host.teaching.beside - set(targets.beside):
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
        weights = checked_weights(weights, rollout)
        if host.model.training and host.args.equal_turns:
            weights = by_turn(weights, spoken)
        of_prompts = [row.prompt_weight for row in rows]
        if host.model.training and host.visits is not None:
            weights = weights * weights.new_tensor(of_prompts).unsqueeze(1)
        gates = [row.gate for row in rows]
        weights = weights * weights.new_tensor(gates).unsqueeze(1)
        intake = host.teaching.readers.intake
        is_gated = intake.reads_outcomes or (intake.is_told and intake.needs_context)
        if is_gated or (host.model.training and host.args.reward_gate is not None):
            of_each = zip(rows, gates, of_prompts, strict=True)
            generated = [gate for row, gate, weight in of_each if weight and not row.is_padding]
            sums = torch.tensor([sum(generated), len(generated)], dtype=torch.float32, device=weights.device)
            total, count = host.accelerator.reduce(sums, "sum").tolist()
            if count:
                host.record("gate/mean", total / count, count)
        found = {
            **kept_by_row(targets, counted).pack(),
            "loss_weights": weights,
            "rows": list(rows),
            **({} if images is None else {"row_images": list(images)}),
            "scored": digest,
            "lengths": list(replace(rollout, weights=weights).ended().lengths or ()),
        }
        if selection is not None:
            found[CANDIDATES] = (weights != 0).sum(1) if selection.is_late else candidates_B
            if selection.is_late:  # the denominator of the step is known before the logits that it needs
                found["loss_weights"] = selection.thinned(weights)
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
        selection = None if scored is not None or self._has_warned else selection_of(self._host)
        if selection is not None and selection.is_late:
            self._has_warned = True
            logger.warning(
                f"`token_selection={selection.criterion!r}` was not applied: `super().compare` applies it, but "
                f"`{type(self._host).__name__}.compare` did not return its result (change that with "
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

    def _seeds(self, rows: Sequence[BatchRow]) -> list[int]:
        """Of `token_selection="random"`, by seed, step, and the place of a row among those of all processes."""
        # Rows of a batch that no dataset gave have no place: their number in it stands in.
        places = [number if row.place is None else row.place for number, row in enumerate(rows)]
        seed, step = self._host.args.seed, self._host.state.global_step
        return [derived_seed(seed, step, place, _SALT) for place in places]

    def _logprobs(self, rollout: Rollout, rows: Sequence[BatchRow]) -> dict[str, Tensor]:
        """What tokens were sampled with, [B, C], if all processes know it for all rows; else empty. Collective."""
        known = [row.logprobs for row in rows]
        # Where a subclass has changed a completion since, what its tokens were sampled with is not known.
        found = [one for one, ids in zip(known, rollout.completion_lists(), strict=True) if one and one[0] == ids]
        device = self._host.accelerator.device
        if not self._host.accelerator.gather(torch.tensor([len(found) == len(rows)], device=device)).all():
            return {}
        logprobs_BC = torch.zeros(rollout.completion_ids.shape)
        for row, (_, values) in enumerate(found):
            logprobs_BC[row, : len(values)] = torch.tensor(values)
        return {"logprobs": logprobs_BC.to(device)}


def selection_of(host: Host) -> Selection | None:
    """Which tokens of each row are trained on; `None` for all, as in every evaluation."""
    args = host.args
    return args.build_selection() if host.model.training else None


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


def by_turn(weights_BC: Tensor, spoken_BC: Tensor) -> Tensor:
    """The weights, divided by their sum over each turn: over tokens that the student generated one after the other."""
    before_BC = torch.nn.functional.pad(spoken_BC, (1, -1))
    turn_BC = (spoken_BC & ~before_BC).cumsum(1) * spoken_BC  # 0 where the student generated nothing
    sums_BT = weights_BC.new_zeros(len(weights_BC), 1 + weights_BC.size(1)).scatter_add(1, turn_BC, weights_BC)
    each_BC: Tensor = sums_BT.gather(1, turn_BC)
    return weights_BC / torch.where(weights_BC > 0, each_BC, 1.0)


def checked_weights(weights: Any, rollout: Rollout) -> Tensor:
    """The weights that `weigh` returned for a rollout, validated, as float32 on its device."""
    if not isinstance(weights, Tensor) or weights.is_complex():
        raise TypeError(f"`weigh` returned a {type(weights).__name__}: expected a tensor of floats, [B, C].")
    expected = rollout.weights.shape
    if weights.shape != expected:
        raise ValueError(f"`weigh` returned weights of shape {tuple(weights.shape)}: expected {tuple(expected)}.")
    # A user may have computed them with a model; the loss has no gradient through them.
    weights = weights.detach().to(rollout.weights.device, torch.float32)
    if not (weights.isfinite() & (weights >= 0) & (weights <= LARGEST_WEIGHT)).all():
        raise ValueError(
            f"`weigh` returned weights from {weights.min():g} to {weights.max():g}: expected finite weights from 0 to "
            f"{LARGEST_WEIGHT:g}. The loss is divided by their sum, so only their ratios matter."
        )
    if (outside := (weights != 0) & ~rollout.counts).any():
        row, place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"`weigh` returned {weights[row, place]:g} for token {place} of row {row}, which is padding, was not "
            "generated by the student, or is excluded by `token_selection`: multiply your weights by `rollout.weights`."
        )
    return weights
