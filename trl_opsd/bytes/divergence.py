"""The divergence of two models' distributions over the next byte, whatever their tokens are.

`P(next byte | bytes so far)` is a sum over the token sequences that begin with these bytes: canonical tokens up to a
border, and then any one token that spells the bytes since and the next one. With the vocabulary sorted by bytes, these
tokens are a range. Borders are those of the text's own tokens, and of forks: further states, where a model's tokens may
part from them. What is not read is bounded; where the bound is above a limit, the position is left out.

By the chain rule, the sum over bytes is the divergence of the two models as distributions over texts.

The rows of the head are sorted once per call, so that the logits of each tile are; the gradient of the head is put back
in the order of ids at the end.

S states · V vocabulary size · T tokens with a meaning · N tokens in the loss and states after forks · P byte positions
H width · F forks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trl_opsd.bytes.ranges import ByteTile, Plan, Tile
from trl_opsd.bytes.table import OUTCOMES, ByteTable, CoveringTree, Numbers, Spelled
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.sampled import against_sampler
from trl_opsd.losses.streamed import folded
from trl_opsd.types import LazyLogits, PerToken, Sampled

_COLUMNS = 64
"""Columns of the head's gradient that are put back in the order of ids at a time."""


@torch.no_grad()
def byte_logarithms(
    model: LazyLogits, table: ByteTable, ids: Tensor, spelled: Spelled, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """A model's distributions over the next byte, for one product with its head, and without logits in full.

    Args:
        model ([`LazyLogits`]):
            S hidden states [S, H], and the head.
        table ([`~bytes.table.ByteTable`]):
            Its vocabulary.
        ids (`torch.Tensor`):
            [S], the token that follows each state that is not after a fork.
        spelled ([`~bytes.table.Spelled`]):
            The byte positions of these tokens.
        chunk_tokens (`int`, *optional*):
            States whose logits exist at a time.

    Returns:
        `tuple`: [P, 257], float32, logarithms of probabilities; and [P], an upper bound on the share that is missed.
    """
    plan = Plan.of(model, chunk_tokens, table, ids, spelled)
    logs_PO = torch.empty(len(spelled.token), OUTCOMES, device=plan.token_P.device)
    missed_P = torch.empty(len(spelled.token), dtype=torch.float64, device=plan.token_P.device)
    for tile in plan.tiles:
        logs_PO[tile.positions], missed_P[tile.positions] = ByteTile(plan, tile).logarithms()
    return logs_PO, missed_P


@torch.no_grad()
def forks_needed(
    model: LazyLogits, table: ByteTable, ids: Tensor, trees: Sequence[CoveringTree], most_missed: float,
    chunk_tokens: int | None = None,
) -> list[Numbers]:  # fmt: skip
    """Which forks have to be read so that no more than a share of a distribution is missed; of each row [F], bool.

    Arguments are those of [`byte_logarithms`], of rows without forks: all tokens of each tree.
    """
    whole = CoveringTree.joined(trees)
    spelled = Spelled.of([whole], None, [0], torch.arange(whole.tokens), undecided=True)
    plan = Plan.of(model, chunk_tokens, table, ids, spelled, outcomes=False)
    device, parent_F = plan.token_P.device, whole.fork[:, 1] - whole.tokens
    follows_F = torch.from_numpy(parent_F >= 0).to(device)
    needed_F = torch.zeros(len(parent_F), dtype=torch.int32, device=device)
    for tile in plan.tiles:
        ByteTile(plan, tile, outcomes=False).need_(needed_F, follows_F, most_missed)
    needed = (needed_F.cpu() > 0).numpy()
    # Only with those that they follow, which come before them.
    for number in (needed & (parent_F >= 0)).nonzero()[0]:
        needed[number] = needed[parent_F[number]]
    return np.split(needed, np.cumsum([len(one.fork) for one in trees])[:-1])


@dataclass(frozen=True, slots=True)
class Bytewise:
    """How tokens of two models are compared by their bytes, for three products with the student's head."""

    student: LazyLogits
    """Hidden states [N, H] and head [V, H]. Rows follow each other."""
    teacher: LazyLogits
    """Logarithms of the teacher's distributions [P, 257], with [`~bytes.table.byte_head`]."""
    divergence: Divergence
    """Compares the 257 outcomes of each position."""
    table: ByteTable
    """The student's vocabulary."""
    spelled: Spelled
    """The byte positions of the tokens."""
    sampled: Sampled
    """The N tokens, and the weight of `-log p` there."""
    chunk_tokens: int | None
    """Tokens whose logits exist at a time."""
    most_missed: float
    """Largest share of a distribution that may be missed; positions above it are left out."""

    def compared(self, weights: Tensor | None) -> PerToken:
        """The divergence of each token, summed over its bytes, in nats; the weight of a byte is that of its token.

        The gradient is valid for the sum over tokens, however scaled.
        """
        value_N, student_entropy_N, teacher_entropy_N, nll_N, *others = folded(self, weights)
        outcomes_N, compared_N, escaped_N, lost_N, own_N = others
        logprobs_N = self.sampled.logprobs
        if logprobs_N is not None and weights is not None:
            logprobs_N = logprobs_N.where(weights != 0, torch.nan)
        kl_N, known_N = (None, None) if logprobs_N is None else against_sampler(own_N, logprobs_N)
        return PerToken(
            divergence=value_N,
            student_entropy=student_entropy_N,
            teacher_entropy=teacher_entropy_N,
            nll=None if self.sampled.nll_weight is None else nll_N,
            sampler_kl=kl_N,
            sampler_known=known_N,
            outcomes=outcomes_N,
            compared=compared_N,
            escaped=escaped_N,
            lost=lost_N,
        )

    def run(
        self, weights_N: Tensor | None, wanted: tuple[bool, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Statistics of each token, [N] each, and the gradients of student hidden, weight and bias, if `wanted`."""
        plan = Plan.of(self.student, self.chunk_tokens, self.table, self.sampled.ids, self.spelled)
        device, dtype = plan.token_P.device, plan.side.weight_VH.dtype
        (tokens, width), rows = plan.side.hidden_NH.shape, len(self.student.head.weight)
        shapes = ((tokens, width), (rows, width), (rows,))
        gradients = [
            torch.zeros(one, device=device) if want else None for one, want in zip(shapes, wanted, strict=True)
        ]
        hidden_NH, *head = gradients
        of_tokens = [None if gradient is None else gradient[: len(self.table.order)] for gradient in head]
        found_9N = torch.zeros(9, tokens, device=device)
        weights_N = torch.ones(tokens, device=device) if weights_N is None else weights_N
        for tile in plan.tiles:
            part = ByteTile(plan, tile)
            leaves = part.found_Q, part.own_S
            with torch.enable_grad():
                for leaf in leaves:
                    leaf.requires_grad_(any(wanted))
                value = self._compared(plan, tile, part, weights_N, found_9N)
            if any(wanted):
                gradient_SV = part.gradient_(*torch.autograd.grad(value, leaves, materialize_grads=True))
                given_ST = gradient_SV[:, : len(self.table.order)].to(dtype)
                plan.side.backproject_(given_ST, tile.states, hidden_NH, *of_tokens, adds=True)
        _by_id(head, plan.table)
        return tuple(found_9N), tuple(gradients)

    def _compared(self, plan: Plan, tile: Tile, part: ByteTile, weights_N: Tensor, found_9N: Tensor) -> Tensor:
        """The weighted loss of the byte positions and tokens of a tile; adds the statistics of their tokens."""
        here, (logarithms_PO, missed_P) = tile.positions, part.logarithms()
        token_P, device = plan.token_P[here], part.own_S.device
        missed_P = missed_P.maximum(plan.missed_P[here])
        held_P = missed_P <= self.most_missed
        logs = logarithms_PO, self.teacher.hidden[here].to(device).double()
        log_student_PO, log_teacher_PO = (one.log_softmax(-1) for one in logs)
        # Of 257 outcomes all can be formed: in float64, without a product that half precision would round.
        value_P = self.divergence.value(log_student_PO, log_teacher_PO).where(held_P, 0.0) * weights_N[token_P]
        value, tokens = value_P.sum(), tile.tokens
        own_N = part.own_S[tokens.start - tile.states.start :]
        nll_N = torch.zeros_like(own_N)
        if self.sampled.nll_weight is not None:
            nll_N = -own_N * self.sampled.nll_weight[tokens] * weights_N[tokens]
            value = value + nll_N.sum()
        counts_N = weights_N[tokens] != 0  # others are read for those that count
        outcomes_N = plan.table.length[self.sampled.ids[tokens]].float() * counts_N
        logs = log_student_PO.detach(), log_teacher_PO
        student_P, teacher_P = (-(one.exp() * one).sum(-1) * held_P for one in logs)  # entropies
        lost_P = -torch.ones_like(missed_P)  # of the outcomes of a token those that have no position
        by_position = {0: value_P, 1: student_P, 2: teacher_P, 5: held_P, 6: missed_P * held_P, 7: lost_P}
        for column, values_P in by_position.items():
            found_9N[column].index_add_(0, token_P, values_P.detach().float())
        by_token = {0: nll_N, 3: nll_N, 4: outcomes_N, 7: outcomes_N, 8: own_N}
        for column, values_N in by_token.items():
            found_9N[column, tokens] += values_N.detach()
        return value


def _by_id(gradients: list[Tensor | None], table: ByteTable) -> None:
    """Moves the rows of sorted tokens, the first ones, to their ids; rows of no token, as those after them, are 0."""
    for gradient in (one for one in gradients if one is not None):
        row_V = torch.full((len(gradient),), len(table.order), dtype=torch.int32, device=gradient.device)
        row_V[table.order] = torch.arange(len(table.order), dtype=torch.int32, device=gradient.device)
        # A few columns at a time, as a second gradient of the head may not fit.
        for some in gradient.view(len(gradient), -1).split(_COLUMNS, 1):
            some.copy_(some.index_select(0, row_V))
