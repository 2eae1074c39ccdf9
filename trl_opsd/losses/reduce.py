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
    weights_N = weights_BC[counts_BC]
    if num_items is None:
        num_items = weights_N.sum() if weights_N.numel() else 1.0
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(divergence.device)
    columns = (
        weights_N,
        divergence.detach(),
        per_token.student_entropy * weights_N,
        per_token.teacher_entropy * weights_N,
        torch.ones_like(weights_N),
        torch.zeros_like(weights_N) if per_token.teacher_uniform is None else per_token.teacher_uniform.to(weights_N),
    )
    values_BC = divergence.new_zeros(counts_BC.shape)
    return LossParts(
        # The gradient of `sum` is one expanded number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / num_items,
        rows=torch.stack([values_BC.masked_scatter(counts_BC, column).sum(1) for column in columns], dim=1),
    )
