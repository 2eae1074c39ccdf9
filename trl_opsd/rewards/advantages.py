"""Turns the rewards of completions into advantages within the group of their prompt, as TRL's GRPO does.

R rows of a generation batch, over all processes · F reward functions · G prompts · n completions of each
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_opsd._compat.trl import nanstd

__all__ = ["Advantages", "advantages", "total"]

_EPSILON = 1e-4
"""Added to each standard deviation before a division, as in TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantages of a generation batch."""

    values: Tensor
    """[R], float32; 0 for a row without a reward."""
    is_flat: Tensor
    """[R], whether the standard deviation that scales the row, or would with scaling, is 0."""


def total(rewards_RF: Tensor, weights_F: Tensor) -> Tensor:
    """[R], the weighted sum of each row's rewards, ignoring NaN; NaN if all are."""
    sums_R = (rewards_RF * weights_F).nansum(dim=1)
    # A sum of nothing would be 0, which is a reward like any other.
    return sums_R.masked_fill(rewards_RF.isnan().all(dim=1), torch.nan)


def advantages(rewards_RF: Tensor, weights_F: Tensor, number: int, scale: str, aggregation: str) -> Advantages:
    """The advantages of a generation batch (DeepSeekMath, arXiv 2402.03300; `"normalize_then_sum"`: 2601.05242)."""
    # The completions of a prompt are adjacent rows; a reward is NaN where its function returned `None`.
    if aggregation == "normalize_then_sum":
        return _normalized_first(rewards_RF, weights_F, number)
    rewards_R = total(rewards_RF, weights_F)
    rewards_Gn = rewards_R.view(-1, number)
    if scale == "batch":
        deviation_R = nanstd(rewards_R).expand_as(rewards_R)
    else:
        deviation_R = nanstd(rewards_Gn, dim=1).repeat_interleave(number)
    values_R = (rewards_Gn - rewards_Gn.nanmean(dim=1, keepdim=True)).flatten()
    return _advantages(values_R if scale == "none" else values_R / (deviation_R + _EPSILON), deviation_R)


def _normalized_first(rewards_RF: Tensor, weights_F: Tensor, number: int) -> Advantages:
    rewards_GnF = rewards_RF.view(-1, number, rewards_RF.size(1))
    differences_GnF = rewards_GnF - rewards_GnF.nanmean(dim=1, keepdim=True)
    scaled_GnF = differences_GnF / (nanstd(rewards_GnF, dim=1, keepdim=True) + _EPSILON)
    # A reward that is alone in its group has no deviation, and adds nothing.
    sums_R = (scaled_GnF.view_as(rewards_RF) * weights_F).nansum(dim=1)
    sums_R = sums_R.masked_fill(rewards_RF.isnan().all(dim=1), torch.nan)
    deviation_R = nanstd(sums_R).expand_as(sums_R)
    return _advantages((sums_R - sums_R.nanmean()) / (deviation_R + _EPSILON), deviation_R)


def _advantages(values_R: Tensor, deviation_R: Tensor) -> Advantages:
    return Advantages(
        values=values_R.nan_to_num(nan=0.0), is_flat=torch.isclose(deviation_R, torch.zeros_like(deviation_R))
    )
