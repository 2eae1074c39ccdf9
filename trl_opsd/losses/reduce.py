"""Adds per-token numbers up to what one process reports; knows rows and masks, and no logits."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.types import LossParts, PerToken


def reduce(per_token: PerToken, loss_mask: Tensor, num_items: Tensor | float | None) -> LossParts:
    """The loss of one micro-batch, and raw local sums for the logs.

    Args:
        per_token ([`~types.PerToken`]):
            [N], the tokens where `loss_mask` is not 0, row by row.
        loss_mask (`torch.Tensor`):
            [B, C], not 0 where the token counts in the loss.
        num_items (`torch.Tensor` or `float`, *optional*):
            Denominator of the loss: the tokens of the whole optimizer step. `None` means the N local tokens, or 1.
    """
    divergence = per_token.divergence
    if isinstance(num_items, Tensor):
        num_items = num_items.to(divergence.device)
    counts_BC = (loss_mask != 0).to(divergence.device)
    columns = (
        torch.ones_like(divergence),
        divergence.detach(),
        per_token.student_entropy,
        per_token.teacher_entropy,
    )
    values_BC = divergence.new_zeros(counts_BC.shape)
    return LossParts(
        # `sum` hands its gradient back as one number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / (max(divergence.numel(), 1) if num_items is None else num_items),
        rows=torch.stack([values_BC.masked_scatter(counts_BC, column).sum(1) for column in columns], dim=1),
    )
