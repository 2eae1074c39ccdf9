"""A teacher with known log-probabilities of some tokens at each position, and of all others together.

N positions · K known tokens · V vocabulary size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trl_opsd.types.loss import OutputHead

_UNRESOLVED = 2.0**-23
"""Minimum probability of the others: float32 log-probabilities do not tell how much less is left."""
LEAST = -80.0
"""Minimum log-probability of the others in a sum, in nats: float32 still has its exponential."""
MOST_IDS = 2**24
"""Token ids below it are exact in float32."""


class KnownTokens(NamedTuple):
    """What is known of a teacher's distributions."""

    ids: Tensor
    """[N, K], int64, the sampled token first; one that is there twice has the same log-probability."""
    logprobs: Tensor
    """[N, K], nats."""
    rest: Tensor
    """[N], nats: the log-probability of all other tokens together."""

    def packed(self) -> Tensor:
        """[N, 2K + 1], float32, which is kept and dealt like the hidden states of other teachers."""
        return torch.cat([self.ids.float(), self.logprobs.float(), self.rest.float()[:, None]], dim=1)

    @classmethod
    def unpack(cls, packed: Tensor) -> KnownTokens:
        """The inverse of [`packed`]."""
        ids, logprobs, rest = packed.split([width := packed.size(1) // 2, width, 1], dim=1)
        return cls(ids.long(), logprobs, rest[:, 0])

    @classmethod
    def of(cls, ids: Tensor, logprobs: Tensor, width: int) -> KnownTokens:
        """From ids [N, M] and log-probabilities, where -1 is no token, the first is one, and none is there twice."""
        rest = (1 - logprobs.double().exp().masked_fill(ids < 0, 0.0).sum(1)).clamp(min=_UNRESOLVED).log()
        ids, logprobs = (torch.cat([one, one[:, :1].expand(-1, width - one.size(1))], 1) for one in (ids, logprobs))
        missing = ids < 0
        return cls(torch.where(missing, ids[:, :1], ids), torch.where(missing, logprobs[:, :1], logprobs), rest)

    def probs(self) -> Tensor:
        """[N, K], 0 where the first token is there again, to fill a row up."""
        again = self.ids == self.ids[:, :1]
        again[:, 0] = False
        return self.logprobs.exp().masked_fill(again, 0.0)

    def entropy(self) -> Tensor:
        """[N], nats, of the distribution in which all other tokens are one: at most the teacher's own."""
        return -(self.probs() * self.logprobs).sum(1) - self.rest.exp() * self.rest

    def likeliest(self, k: int) -> tuple[Tensor, Tensor]:
        """Probabilities and ids, [N, k], of the likeliest known tokens."""
        probs, at = self.probs().topk(min(k, self.ids.size(1)))
        return probs, self.ids.gather(1, at)


@dataclass(frozen=True, slots=True)
class TokenHead(OutputHead):
    """Stands for the head of such a teacher; what it takes for hidden states are its [`KnownTokens`], packed.

    Its weight, [V, 2K + 1], is a single number that no product ever uses.
    """

    @classmethod
    def sized(cls, vocabulary: int, known: int, device: torch.device) -> TokenHead:
        """The head of a teacher with V tokens and K known ones."""
        return cls(torch.zeros(1, 1, device=device).expand(vocabulary, 2 * known + 1))

    def to(self, device: torch.device) -> TokenHead:
        rows, width = self.weight.shape
        return self if self.weight.device == device else self.sized(rows, width // 2, device)
