"""Speculative decoding, enumerated in full: how often it accepts a token of the student, and what the losses tell."""

from __future__ import annotations

import pytest
import torch
from heads import of_logits
from torch.testing import assert_close

from trl_opsd.losses import (
    ForwardKL,
    NegativeLogAcceptance,
    ReferenceModel,
    Sampled,
    TotalVariation,
    dense_divergence,
    streamed_divergence,
)

pytestmark = pytest.mark.quick

BOTH = pytest.mark.parametrize("divergence", [TotalVariation(), NegativeLogAcceptance()], ids=repr)
COMPUTE = pytest.mark.parametrize("compute", [streamed_divergence, dense_divergence])


def logits(rows=5, vocabulary=7, spread=2.0):
    return spread * torch.randn(2, rows, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def enumerated(student_V, teacher_V):
    """Each proposal of the drafter is kept with probability min(1, p/q), else replaced: mass kept, and of tokens."""
    q, p = student_V.softmax(-1), teacher_V.softmax(-1)
    kept = [q[x] * torch.minimum(torch.ones_like(p[x]), p[x] / q[x]) for x in range(len(q))]
    rest = (p - q).clamp(min=0)
    accepted = torch.stack(kept).sum()
    return accepted, torch.stack(kept) + (1 - accepted) * rest / rest.sum()


@BOTH
@COMPUTE
def test_values_and_gradients_are_of_the_enumerated_acceptance(divergence, compute):
    student, teacher = logits()
    student.requires_grad_()
    found = [enumerated(*pair) for pair in zip(student, teacher, strict=True)]
    assert_close(torch.stack([tokens for _, tokens in found]), teacher.softmax(-1))  # it samples from the target
    accepted = torch.stack([one for one, _ in found])
    value = 1 - accepted if divergence == TotalVariation() else -accepted.log()
    (gradient,) = torch.autograd.grad(value.sum(), student)
    mine = student.detach().float().requires_grad_()
    per_token = compute(of_logits(mine), of_logits(teacher.float()), divergence)
    (ours,) = torch.autograd.grad(per_token.divergence.sum(), mine)
    assert_close(per_token.divergence.double(), value.detach(), rtol=1e-5, atol=1e-6)
    assert_close(per_token.accepted.double(), accepted.detach(), rtol=1e-5, atol=1e-6)
    assert_close(ours.double(), gradient, rtol=1e-5, atol=1e-6)


@BOTH
@COMPUTE
def test_acceptance_leaves_out_weights_pull_and_anchor(divergence, compute):
    student, teacher = logits().float()
    pair, other = (of_logits(student, 0.7), of_logits(teacher, 1.3)), ReferenceModel(of_logits(teacher + 1), anchor=0.5)
    of = Sampled(torch.arange(5), nll_weight=torch.ones(5))
    weighed = compute(*pair, divergence, torch.linspace(0.5, 3, 5), sampled=of, references=[other], anchor=ForwardKL())
    accepted = torch.minimum((student / 0.7).softmax(-1), (teacher / 1.3).softmax(-1)).sum(-1)
    assert_close(weighed.accepted, accepted)
    assert_close(compute(*pair, divergence).accepted, accepted)


@COMPUTE
def test_acceptance_is_unknown_where_values_do_not_tell(compute):
    student, teacher = map(of_logits, logits().float())
    assert compute(student, teacher, ForwardKL()).accepted is None
    assert compute(student, teacher, TotalVariation(), kl_clip=0.1).accepted is None
    pushed = [ReferenceModel(student, push=0.5)]
    assert compute(student, teacher, TotalVariation(), references=pushed).accepted is None


def test_an_overlap_below_float32_keeps_value_and_gradient():
    """One model's tokens are 300 nats below those of the other: the smallest positive float32 is e^-104."""
    student, teacher = torch.tensor([[0.0, -1, -300, -301]]), torch.tensor([[-300.0, -302, 0, -1]])
    found = []
    for compute in (streamed_divergence, dense_divergence):
        mine = student.clone().requires_grad_()
        per_token = compute(of_logits(mine), of_logits(teacher), NegativeLogAcceptance())
        found.append((per_token.divergence, torch.autograd.grad(per_token.divergence.sum(), mine)[0]))
    assert_close(*found)
    (value, gradient), _ = found
    assert 298 < value < 302
    assert_close(gradient.abs().sum(), torch.tensor(1.0), rtol=0.5, atol=0)
    assert gradient.abs().max() <= 1


def test_a_near_acceptance_of_1_is_not_lost_in_rounding():
    student = logits(50, 100)[0]
    teacher = student + 1e-4 * logits(50, 100)[1]
    exact = dense_divergence(of_logits(student), of_logits(teacher), NegativeLogAcceptance()).divergence
    found = streamed_divergence(
        of_logits(student.float()), of_logits(teacher.float()), NegativeLogAcceptance()
    ).divergence
    assert 1e-5 < exact.mean() < 1e-3
    assert_close(found, exact, rtol=2e-3, atol=0)
