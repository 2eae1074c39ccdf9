"""Compares the student with its teachers' targets: each token with those of its own teacher.

B rows · C completion tokens · N tokens in the loss · H hidden width
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trl_opsd.losses import Divergence, reduce, streamed_divergence
from trl_opsd.teacher.routed import tokens_by_teacher
from trl_opsd.types import LazyLogits, LossParts, OutputHead, TeacherTargets


def compared(
    hidden_BCH: Tensor,
    head: OutputHead,
    targets: TeacherTargets,
    teacher_heads: Sequence[OutputHead],
    weights_BC: Tensor,
    num_items: Tensor | float | None,
    *,
    divergence: Divergence,
    temperature: float,
    chunk_tokens: int | None,
    vocabulary: int | None,
) -> LossParts:
    """The loss of one micro-batch.

    Args:
        hidden_BCH (`torch.Tensor`):
            [B, C, H], the student's last hidden states at the positions that predict the completion.
        head ([`~types.OutputHead`]):
            The student's.
        targets ([`~types.TeacherTargets`]):
            Row-aligned with them.
        teacher_heads (`Sequence[OutputHead]`):
            Of all teachers, in their order.
        weights_BC (`torch.Tensor`):
            [B, C], the weight of each token.
        num_items (`torch.Tensor` or `float`, *optional*):
            Denominator: the sum of weights over the whole optimizer step. `None` means over this micro-batch.
        divergence ([`~losses.Divergence`]):
            The objective.
        temperature (`float`):
            Of both distributions.
        chunk_tokens (`int`, *optional*):
            Tokens whose logits exist at once.
        vocabulary (`int`, *optional*):
            Size of the shared vocabulary, where the heads differ in size.
    """
    counts_BC = weights_BC != 0
    if num_items is None:
        num_items = weights_BC.sum() if counts_BC.any() else 1.0
    parts: LossParts | None = None
    for teacher_head, teacher_BCH, theirs_BC in tokens_by_teacher(teacher_heads, targets, counts_BC):
        of_theirs_BC = weights_BC * theirs_BC
        per_token = streamed_divergence(
            LazyLogits(_select(hidden_BCH, theirs_BC, head), head, temperature),
            LazyLogits(_select(teacher_BCH, theirs_BC, teacher_head), teacher_head, temperature),
            divergence,
            weights=_unless_ones(weights_BC[theirs_BC].to(head.weight.device)),
            chunk_tokens=chunk_tokens,
            vocabulary=vocabulary,
        )
        part = reduce(per_token, of_theirs_BC, num_items)
        parts = part if parts is None else parts + part
    assert parts is not None, "there is a teacher"
    return parts


def _unless_ones(weights_N: Tensor) -> Tensor | None:
    """The weights, or `None` if all are 1, which saves the loss a product with each logit's gradient."""
    return None if bool((weights_N == 1).all()) else weights_N


def _select(hidden_BCH: Tensor, counts_BC: Tensor, head: OutputHead) -> Tensor:
    """The hidden states of the tokens in the loss, [N, H], on the head's device."""
    device = head.weight.device
    return hidden_BCH.to(device)[counts_BC.to(device)]
