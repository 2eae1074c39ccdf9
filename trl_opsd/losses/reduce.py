"""Reduces per-token values to the loss and sums of one process; knows rows and weights, not logits.

B rows · C completion tokens · T tenths of a completion · N tokens in the loss
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.types import LossParts, PerToken
from trl_opsd.types.loss import TENTHS, UNWEIGHTED


def reduce(
    per_token: PerToken,
    weights: Tensor,
    num_items: Tensor | float | None,
    real: Tensor | None = None,
    places: Tensor | None = None,
) -> LossParts:
    """The loss of one micro-batch, and raw local sums for the logs.

    Args:
        per_token ([`~types.PerToken`]):
            [N], the tokens where `weights` is not 0, row by row; its divergences are weighted, its entropies are not.
        weights (`torch.Tensor`):
            [B, C], weight of each token in the loss.
        num_items (`torch.Tensor` or `float`, *optional*):
            Denominator of the loss: a process's share of the sum of the weights of the whole optimizer step. When
            `None`, the sum of `weights`, or 1 if there are no tokens.
        real (`torch.Tensor`, *optional*):
            [B, C], not 0 where there is a token of the completion. When `None`, the rows are parts of completions, and
            what depends on places within one is 0.
        places (`torch.Tensor`, *optional*):
            [N], indices in [B * C] of these tokens, whose values are 0 where `weights` is. When `None`, `weights` is
            0 for no other token.
    """
    divergence = per_token.divergence
    weights_BC = weights.to(divergence.device, divergence.dtype, non_blocking=True)
    counts_BC = weights_BC != 0
    if num_items is None:
        total = weights_BC.sum()
        num_items = total.where(total > 0, 1.0)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(divergence.device)
    none_B = weights_BC.new_zeros(len(weights_BC))

    def spread(values_N: Tensor) -> Tensor:
        # Scattered to [B, C] rather than weights gathered to [N]: boolean indexing would wait for the device.
        values_N = values_N.to(weights_BC)
        if places is None:
            return torch.zeros_like(weights_BC).masked_scatter(counts_BC, values_N)
        at_N = places.to(weights_BC.device, non_blocking=True)
        return torch.zeros_like(weights_BC).view(-1).index_copy(0, at_N, values_N).view_as(weights_BC)

    # `nll` and anchor are logged separately: divergences are those from the target alone.
    alone_N = divergence.detach()
    for added_N in (per_token.nll, per_token.anchored):
        alone_N = alone_N if added_N is None else alone_N - added_N
    divergence_BC = spread(alone_N)
    unweighted = {name: values_N for name in UNWEIGHTED if (values_N := getattr(per_token, name)) is not None}
    sums = {
        "weight": weights_BC.sum(1),
        "divergence": divergence_BC.sum(1),
        "student_entropy": (spread(per_token.student_entropy) * weights_BC).sum(1),
        "teacher_entropy": (spread(per_token.teacher_entropy) * weights_BC).sum(1),
        "tokens": counts_BC.sum(1).to(weights_BC),
        **{name: spread(values_N).sum(1) for name, values_N in unweighted.items()},
    }
    if real is not None:
        sums.update(by_tenth(real.to(divergence.device), weights_BC, divergence_BC))
    # A name that is no column would leave its column at 0, which would be logged as if measured.
    assert sums.keys() <= set(LossParts.ROW_NAMES), sums.keys() - set(LossParts.ROW_NAMES)
    return LossParts(
        # The gradient of `sum` is one expanded number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / num_items,
        rows=torch.stack([sums.get(name, none_B) for name in LossParts.ROW_NAMES], dim=1),
    )


def by_tenth(real_BC: Tensor, weights_BC: Tensor, divergence_BC: Tensor) -> dict[str, Tensor]:
    """[B] each, by name: sums of weights and of divergences (already weighted) in each tenth of a completion."""
    # `real` marks every token of the completion, also of weight 0: tenths do not depend on which tokens count.
    places_BC = (real_BC != 0).cumsum(1)
    # Tokens before the first real one and after the last fall into some tenth too, with a weight of 0.
    tenths_BC = (places_BC - 1).clamp(min=0) * TENTHS // places_BC[:, -1:].clamp(min=1)
    values_B2C = torch.stack([weights_BC, divergence_BC], dim=1)
    sums_B2T = values_B2C.new_zeros(len(values_B2C), 2, TENTHS)
    sums_B2T = sums_B2T.scatter_add(2, tenths_BC[:, None].expand_as(values_B2C), values_B2C)
    return {
        f"{name}_{tenth}": sums_B2T[:, row, tenth]
        for row, name in enumerate(("weight", "divergence"))
        for tenth in range(TENTHS)
    }
