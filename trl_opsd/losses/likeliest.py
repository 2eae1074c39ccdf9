"""Overlap of the likeliest tokens of both models, measured on a sample of the rows.

N tokens in the loss · R rows (tokens) · V vocabulary size · K likeliest tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

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
