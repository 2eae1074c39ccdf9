"""How far the likeliest tokens of both models are the same, known from a part of the rows.

N tokens in the loss · R rows (tokens) · V vocabulary size · K likeliest tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

LIKELIEST = 16
"""K, of arXiv 2604.13016; the whole vocabulary where that is smaller."""
EVERY = 16
"""One of so many tokens is looked at, as to rank a vocabulary takes as long as to normalise it."""


def looked_at(tokens: int, rows: slice) -> slice:
    """Which of the rows of a call with so many tokens are looked at, counted from the first of these rows.

    They are equally far apart, and there is one where there is a token.
    """
    middle = (tokens - 1) % EVERY // 2
    return slice((middle - rows.start) % EVERY, rows.stop - rows.start, EVERY)


def top_shared(student_RV: Tensor, teacher_RV: Tensor) -> Tensor:
    """The share of the K likeliest tokens of one model that are among those of the other, and the probability that the
    student gives to these, [2, R].

    Args:
        student_RV, teacher_RV (`torch.Tensor`):
            [R, V], logits, up to a number for each row.
    """
    k = min(LIKELIEST, student_RV.size(-1))
    own_RK = student_RV.topk(k, sorted=False)
    theirs_RK = teacher_RV.topk(k, sorted=False).indices
    both_RK = (own_RK.indices.unsqueeze(-1) == theirs_RK.unsqueeze(-2)).any(-1)
    probs_RK = (own_RK.values - student_RV.logsumexp(-1, keepdim=True)).exp()
    return torch.stack([both_RK.float().mean(-1), (probs_RK * both_RK).sum(-1).float()])
