"""Reduces per-token values to the loss and sums of one process; knows rows and weights, not logits."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.types import LossParts, PerToken


def reduce(per_token: PerToken, weights: Tensor, num_items: Tensor | float | None) -> LossParts:
    """The loss of one micro-batch, and raw local sums for the logs.

    Args:
        per_token ([`~types.PerToken`]):
            [N], the tokens where `weights` is not 0, row by row; its divergences are weighted, its entropies are not.
        weights (`torch.Tensor`):
            [B, C], weight of each token in the loss.
        num_items (`torch.Tensor` or `float`, *optional*):
            Denominator of the loss: the sum of the weights of the whole optimizer step. When `None`, the sum of
            `weights`, or 1 if there are no tokens.
    """
    divergence = per_token.divergence
    weights_BC = weights.to(divergence.device, divergence.dtype)
    counts_BC = weights_BC != 0
    if num_items is None:
        total = weights_BC.sum()
        num_items = total.where(total > 0, 1.0)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(divergence.device)
    none_B = weights_BC.new_zeros(len(weights_BC))

    def sums(values_N: Tensor, factors_BC: Tensor | float = 1.0) -> Tensor:
        # Scattered, because to select the weights of the tokens would wait for the device.
        return (torch.zeros_like(weights_BC).masked_scatter(counts_BC, values_N.to(weights_BC)) * factors_BC).sum(1)

    def sums_if_known(values_N: Tensor | None, factors_BC: Tensor | float = 1.0) -> Tensor:
        return none_B if values_N is None else sums(values_N, factors_BC)

    pulled_B = sums_if_known(per_token.pulled)
    columns = (
        weights_BC.sum(1),
        sums(divergence.detach()) - pulled_B,
        sums(per_token.student_entropy, weights_BC),
        sums(per_token.teacher_entropy, weights_BC),
        counts_BC.sum(1).to(weights_BC),
        sums_if_known(per_token.teacher_uniform),
        sums_if_known(per_token.clipped),
        pulled_B,
        sums_if_known(per_token.same_first),
        sums_if_known(per_token.teacher_first),
        sums_if_known(per_token.importance),
    )
    return LossParts(
        # The gradient of `sum` is one expanded number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / num_items,
        rows=torch.stack(columns, dim=1),
    )
