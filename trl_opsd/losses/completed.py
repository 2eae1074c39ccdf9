"""Completes a teacher with some known tokens: all others share their probability as they do in the student.

Then every divergence of the whole vocabulary can be taken from it. Of an f-divergence this is exactly the divergence of
two distributions in which the other tokens are one, with its gradient: tokens with one ratio can be merged without
changing the divergence. So it is never above that from the teacher's own distribution (data processing inequality), it
is 0 where both models agree, and the other tokens keep their ratios; where ids beyond V are left out, the rest is
renormalised.

R rows (tokens) · C tokens of a tile · V vocabulary size
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trl_opsd.losses.elementwise import Finish
from trl_opsd.types.known import KnownTokens


def complete_(logits_RV: Tensor, known: KnownTokens) -> None:
    """Overwrites the student's logits with the teacher's log-probabilities, up to what it gives ids beyond V."""
    ids_RK, logprobs_RK, rest_R = known
    beyond_RK = ids_RK >= logits_RV.size(1)  # such a token has no probability here, in neither model
    ids_RK = torch.where(beyond_RK, ids_RK[:, :1], ids_RK)
    logprobs_RK = torch.where(beyond_RK, logprobs_RK[:, :1], logprobs_RK).to(logits_RV)
    logits_RV.scatter_(1, ids_RK, torch.finfo(logits_RV.dtype).min)
    logits_RV.sub_((logits_RV.logsumexp(1) - rest_R)[:, None]).scatter_(1, ids_RK, logprobs_RK)


@dataclass(frozen=True, slots=True)
class CompletedSide:
    """Such a teacher in a streamed loss, in the place of a [`~losses.side.Side`]."""

    known: KnownTokens
    """Of all N tokens."""
    student: Finish
    """Turns the student's products into logits."""
    student_CV: Tensor
    """The tile with these products; read when this teacher's is written."""
    finish: Finish = field(default=Finish(None, None))

    def project_(self, out_CV: Tensor, rows: slice, times: float = 1.0, carry: float = 0.0) -> None:
        """Writes the teacher's log-probabilities of these rows into the first rows of a tile."""
        tile_CV = out_CV[: rows.stop - rows.start]
        tile_CV.copy_(self.student_CV[: len(tile_CV)])
        self.student(tile_CV)
        complete_(tile_CV, KnownTokens(*(one[rows] for one in self.known)))
