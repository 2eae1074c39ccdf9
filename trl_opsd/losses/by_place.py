"""Sums a divergence by its place in the completion, and over the tokens about which the student is least certain.

B rows · C completion tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.types.loss import TENTHS

ONE_IN = 5
"""Of how many tokens one counts as uncertain: the fifth with the highest entropy, as in arXiv 2506.01939."""


def by_tenth(real_BC: Tensor, weights_BC: Tensor, divergence_BC: Tensor) -> Tensor:
    """Weights and divergences of each tenth of a completion.

    Args:
        real_BC (`torch.Tensor`):
            Not 0 where there is a token of the completion, whether it counts in the loss or not.
        weights_BC (`torch.Tensor`):
            Weights of the tokens.
        divergence_BC (`torch.Tensor`):
            Divergences, multiplied by the weights.

    Returns:
        `torch.Tensor`: [B, 20], the sums of the weights of the ten parts, then those of the divergences.
    """
    places_BC = (real_BC != 0).cumsum(1)
    tenths_BC = (places_BC - 1).clamp(min=0) * TENTHS // places_BC[:, -1:].clamp(min=1)
    values_B2C = torch.stack([weights_BC, divergence_BC], dim=1)
    sums_B2T = values_B2C.new_zeros(len(values_B2C), 2, TENTHS)
    return sums_B2T.scatter_add(2, tenths_BC[:, None].expand_as(values_B2C), values_B2C).flatten(1)


def where_uncertain(counts_BC: Tensor, weights_BC: Tensor, divergence_BC: Tensor, entropy_BC: Tensor) -> Tensor:
    """The weight and the divergence of the tokens of each row at which the student's entropy is highest.

    Args:
        counts_BC (`torch.Tensor`):
            Whether a token is in the loss.
        weights_BC, divergence_BC (`torch.Tensor`):
            As for [`by_tenth`].
        entropy_BC (`torch.Tensor`):
            The student's entropies.

    Returns:
        `torch.Tensor`: [B, 2]. Of n tokens the first `ceil(n / 5)`, and those of the same entropy as the last of them.
    """
    entropy_BC = entropy_BC.masked_fill(~counts_BC, -torch.inf)
    last_B = ((counts_BC.sum(1) - 1) // ONE_IN).clamp(min=0)
    lowest_B1 = entropy_BC.sort(dim=1, descending=True).values.gather(1, last_B[:, None])
    chosen_BC = counts_BC & (entropy_BC >= lowest_B1)
    return torch.stack([(one * chosen_BC).sum(1) for one in (weights_BC, divergence_BC)], dim=1)
