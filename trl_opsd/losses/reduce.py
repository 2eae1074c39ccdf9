"""Reduces per-token values to the loss and sums of one process; knows rows and weights, not logits."""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.losses.diagnostics import by_tenth, where_uncertain
from trl_opsd.types import LossParts, PerToken
from trl_opsd.types.loss import UNWEIGHTED


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
    none_B = weights_BC.new_zeros(len(weights_BC))

    def spread(values_N: Tensor) -> Tensor:
        # Scattered to [B, C] rather than weights gathered to [N]: boolean indexing would wait for the device.
        return torch.zeros_like(weights_BC).masked_scatter(counts_BC, values_N.to(weights_BC))

    added_N = 0.0 if per_token.pulled is None else per_token.pulled
    # The pull is logged separately: divergences are those of the distributions alone.
    divergence_BC, entropy_BC = spread(divergence.detach() - added_N), spread(per_token.student_entropy)
    unweighted = {name: values_N for name in UNWEIGHTED if (values_N := getattr(per_token, name)) is not None}
    sums = {
        "weight": weights_BC.sum(1),
        "divergence": divergence_BC.sum(1),
        "student_entropy": (entropy_BC * weights_BC).sum(1),
        "teacher_entropy": (spread(per_token.teacher_entropy) * weights_BC).sum(1),
        "tokens": counts_BC.sum(1).to(weights_BC),
        **{name: spread(values_N).sum(1) for name, values_N in unweighted.items()},
    }
    if real is not None:
        sums.update(where_uncertain(counts_BC, weights_BC, divergence_BC, entropy_BC))
        sums.update(by_tenth(real.to(divergence.device), weights_BC, divergence_BC))
    # A name that is no column would leave its column at 0, which would be logged as if measured.
    assert sums.keys() <= set(LossParts.ROW_NAMES), sums.keys() - set(LossParts.ROW_NAMES)
    return LossParts(
        # The gradient of `sum` is one expanded number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / num_items,
        rows=torch.stack([sums.get(name, none_B) for name in LossParts.ROW_NAMES], dim=1),
    )
