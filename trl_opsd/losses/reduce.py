"""Reduces per-token values to the loss and sums of one process; knows rows and weights, not logits.

B rows · C completion tokens · T tenths of a completion · N tokens in the loss · K values of each
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.types import LossParts, PerToken
from trl_opsd.types.loss import OF_AUTHORS, TENTHS, UNWEIGHTED


def reduce(
    per_token: PerToken,
    weights: Tensor,
    num_items: Tensor | float | None,
    real: Tensor | None = None,
    places: Tensor | None = None,
    authors: Tensor | None = None,
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
        authors (`torch.Tensor`, *optional*):
            [B, C], the [`~types.rollout.Author`] of each token. When `None`, the student wrote all.
    """
    divergence = per_token.divergence
    weights_BC = weights.to(divergence.device, divergence.dtype, non_blocking=True)
    counts_BC = weights_BC != 0
    if num_items is None:
        total = weights_BC.sum()
        num_items = total.where(total > 0, 1.0)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(divergence.device)
    # `nll` and anchor are logged separately: divergences are those from the target alone.
    alone_N = divergence.detach()
    for added_N in (per_token.nll, per_token.anchored):
        alone_N = alone_N if added_N is None else alone_N - added_N
    names = ["divergence", "student_entropy", "teacher_entropy"]
    names += [name for name in UNWEIGHTED if getattr(per_token, name) is not None]
    values = [alone_N, *(getattr(per_token, name) for name in names[1:])]
    values_KN = torch.stack([values_N.to(weights_BC) for values_N in values])
    values_KBC = weights_BC.new_zeros(len(names), *weights_BC.shape)
    # Scattered to [B, C] rather than weights gathered to [N]: boolean indexing would wait for the device.
    if places is None:
        values_KBC.masked_scatter_(counts_BC, values_KN)
    else:
        values_KBC.flatten(1).index_copy_(1, places.to(weights_BC.device, non_blocking=True), values_KN)
    values_KBC[1:3] *= weights_BC  # entropies, as divergences come weighted
    sums = dict(zip(names, values_KBC.sum(2), strict=True))
    sums |= {"weight": weights_BC.sum(1), "tokens": counts_BC.sum(1).to(weights_BC)}
    tenths_BX = weights_BC.new_zeros(len(weights_BC), 2 * TENTHS)
    of_BC = torch.ones_like(counts_BC) if authors is None else authors.to(divergence.device, non_blocking=True)
    values_3BC = torch.stack([weights_BC, values_KBC[0], counts_BC.to(weights_BC)])
    for author, its_names in enumerate(OF_AUTHORS):
        sums |= zip(its_names, (values_3BC * (of_BC == author)).sum(2), strict=True)
    whole = [sums.get(name, tenths_BX[:, 0]) for name in LossParts.ROW_NAMES[: -2 * TENTHS]]
    if real is not None:
        tenths_BX = by_tenth(real.to(divergence.device), weights_BC, values_KBC[0])
    return LossParts(
        # The gradient of `sum` is one expanded number for all tokens, which the streamed loss recognises for free.
        loss=divergence.sum() / num_items,
        rows=torch.cat([torch.stack(whole, dim=1), tenths_BX], dim=1),
    )


def by_tenth(real_BC: Tensor, weights_BC: Tensor, divergence_BC: Tensor) -> Tensor:
    """[B, 2T]: sums of weights, then of divergences (already weighted), in each tenth of a completion."""
    # `real` marks every token of the completion, also of weight 0: tenths do not depend on which tokens count.
    places_BC = (real_BC != 0).cumsum(1)
    # Tokens before the first real one and after the last fall into some tenth too, with a weight of 0.
    tenths_BC = (places_BC - 1).clamp(min=0) * TENTHS // places_BC[:, -1:].clamp(min=1)
    values_B2C = torch.stack([weights_BC, divergence_BC], dim=1)
    sums_B2T = values_B2C.new_zeros(len(values_B2C), 2, TENTHS)
    return sums_B2T.scatter_add(2, tenths_BC[:, None].expand_as(values_B2C), values_B2C).flatten(1)
