"""Validates the token weights that `weigh` returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_opsd.types import Rollout

LARGEST = 1e20
"""Sums of weighted nats are float32, whose maximum is 3e38."""


def checked_weights(weights: Any, rollout: Rollout) -> Tensor:
    """The weights that `weigh` returned for a rollout, validated, as float32 on its device."""
    if not isinstance(weights, Tensor) or weights.is_complex():
        raise TypeError(f"`weigh` returned a {type(weights).__name__}: expected a tensor of floats, [B, C].")
    expected = rollout.weights.shape
    if weights.shape != expected:
        raise ValueError(f"`weigh` returned weights of shape {tuple(weights.shape)}: expected {tuple(expected)}.")
    # A user may have computed them with a model; the loss has no gradient through them.
    weights = weights.detach().to(rollout.weights.device, torch.float32)
    if not (weights.isfinite() & (weights >= 0) & (weights <= LARGEST)).all():
        raise ValueError(
            f"`weigh` returned weights from {weights.min():g} to {weights.max():g}: expected finite ones of at least 0 "
            f"and at most {LARGEST:g}. The loss is divided by their sum, so only their ratios matter."
        )
    if (outside := (weights != 0) & ~rollout.counts).any():
        row, place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"`weigh` returned {weights[row, place]:g} for token {place} of row {row}, which is padding, was not "
            "written by the student, or is left out by `token_selection`: multiply your weights by `rollout.weights`."
        )
    return weights
