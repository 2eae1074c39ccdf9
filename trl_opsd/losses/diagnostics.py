"""Measures beside the loss: by position, where the student is least certain, and how far both models rank alike.

B rows · C completion tokens · T tenths of a completion
N tokens in the loss · R rows (tokens) · V vocabulary size · K likeliest tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from trl_opsd.types.loss import TENTHS

ONE_IN = 5
"""One in so many tokens counts as uncertain: the fifth with the highest entropy, as in arXiv 2506.01939."""


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


def where_uncertain(
    counts_BC: Tensor, weights_BC: Tensor, divergence_BC: Tensor, entropy_BC: Tensor
) -> dict[str, Tensor]:
    """[B] each, by name: sums over the tokens of each row with the highest student entropy."""
    entropy_BC = entropy_BC.masked_fill(~counts_BC, -torch.inf)
    # Of n tokens the first ceil(n / 5), and all that tie with the last of them.
    last_B = ((counts_BC.sum(1) - 1) // ONE_IN).clamp(min=0)
    lowest_B1 = entropy_BC.sort(dim=1, descending=True).values.gather(1, last_B[:, None])
    chosen_BC = counts_BC & (entropy_BC >= lowest_B1)
    values = {"high_entropy_weight": weights_BC, "high_entropy_divergence": divergence_BC}
    return {name: (one * chosen_BC).sum(1) for name, one in values.items()}


LIKELIEST = 16
"""K, of arXiv 2604.13016; the whole vocabulary where that is smaller."""
EVERY = 16
"""One of so many tokens is ranked, because ranking a vocabulary takes as long as normalising it."""


def looked_at(tokens: int, rows: slice) -> slice:
    """Which of these rows of a call with so many tokens are ranked, counted from the first of these rows."""
    # Equally far apart over the whole call, whatever its tiles are, and at least one where there is a token.
    middle = (tokens - 1) % EVERY // 2
    return slice((middle - rows.start) % EVERY, rows.stop - rows.start, EVERY)


def top_shared_(logits_2RV: Tensor) -> Tensor:
    """[2, R]: the share of one model's K likeliest tokens that are among the other's, and the student's mass there."""
    # Logits of student and teacher, up to a constant per row; the student's are overwritten.
    top_2RK, ids_2RK = logits_2RV.topk(min(LIKELIEST, logits_2RV.size(-1)), sorted=False)
    both_RK = (ids_2RK[0].unsqueeze(-1) == ids_2RK[1].unsqueeze(-2)).any(-1)
    first_R1 = top_2RK[0].amax(-1, keepdim=True)
    total_R = logits_2RV[0].sub_(first_R1).exp_().sum(-1)
    mass_R = ((top_2RK[0] - first_R1).exp_() * both_RK).sum(-1) / total_R
    return torch.stack([both_RK.float().mean(-1), mass_R.float()])
