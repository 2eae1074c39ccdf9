"""Reduces per-token values to the loss and sums of one process; knows rows and weights, not logits."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.losses.diagnostics import by_tenth, where_uncertain
from trl_opsd.types import LossParts, PerToken


def reduce(
    per_token: PerToken, weights: Tensor, num_items: Tensor | float | None, real: Tensor | None = None
) -> LossParts:
    """The loss of one micro-batch, and raw local sums for the logs.

    Args:
        per_token ([`~types.PerToken`]):
            [N], the tokens where `weights` is not 0, row by row; its divergences are weighted, its entropies are not.
        weights (`torch.Tensor`):
            [B, C], weight of each token in the loss.
        num_items (`torch.Tensor` or `float`, *optional*):
            Denominator of the loss: the sum of the weights of the whole optimizer step. When `None`, the sum of
            `weights`, or 1 if there are no tokens.
        real (`torch.Tensor`, *optional*):
            [B, C], not 0 where there is a token of the completion. When `None`, the rows are parts of completions, and
            what depends on places and ranks within one is 0.
    """
    divergence = per_token.divergence
    weights_BC = weights.to(divergence.device, divergence.dtype)
    counts_BC = weights_BC != 0
    if num_items is None:
        total = weights_BC.sum()
        num_items = total.where(total > 0, 1.0)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(divergence.device)
    # The columns follow `LossParts.ROW_NAMES`.
    none_B = weights_BC.new_zeros(len(weights_BC))

    def spread(values_N: Tensor) -> Tensor:
        # Scattered to [B, C] rather than weights gathered to [N]: boolean indexing would wait for the device.
        return torch.zeros_like(weights_BC).masked_scatter(counts_BC, values_N.to(weights_BC))

    def sums(values_N: Tensor | None) -> Tensor:
        return none_B if values_N is None else spread(values_N).sum(1)

    added_N = 0.0 if per_token.pulled is None else per_token.pulled
    # The pull is logged separately: divergences are those of the distributions alone.
    divergence_BC, entropy_BC = spread(divergence.detach() - added_N), spread(per_token.student_entropy)
    columns = (
        weights_BC.sum(1),
        divergence_BC.sum(1),
        (entropy_BC * weights_BC).sum(1),
        (spread(per_token.teacher_entropy) * weights_BC).sum(1),
        counts_BC.sum(1).to(weights_BC),
        sums(per_token.teacher_uniform),
        sums(per_token.clipped),
        sums(per_token.pulled),
        sums(per_token.same_first),
        sums(per_token.teacher_first),
        sums(per_token.importance),
        sums(per_token.ranked),
        sums(per_token.top_shared),
        sums(per_token.top_mass),
    )
    if real is None:
        placed = weights_BC.new_zeros(len(weights_BC), len(LossParts.ROW_NAMES) - len(columns))
    else:
        placed = torch.cat(
            [
                where_uncertain(counts_BC, weights_BC, divergence_BC, entropy_BC),
                by_tenth(real.to(divergence.device), weights_BC, divergence_BC),
            ],
            dim=1,
        )
    return LossParts(
        # The gradient of `sum` is one expanded number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / num_items,
        rows=torch.cat([torch.stack(columns, dim=1), placed], dim=1),
    )
