"""The divergence between the teacher's likeliest tokens and a bucket of all others."""

from __future__ import annotations

import pytest
import torch
from test_streamed import ENTRYWISE
from torch.testing import assert_close

from trl_opsd.losses import (
    Divergence,
    ForwardKL,
    LazyLogits,
    NegativeLogAcceptance,
    OutputHead,
    ReverseKL,
    SampledReverseKL,
    TopKTeacher,
    dense_divergence,
    streamed_divergence,
)

pytestmark = pytest.mark.quick

each = pytest.mark.parametrize("of", ENTRYWISE, ids=repr)


def rows(logits):
    """Both sides of a loss whose logits are these."""
    head = OutputHead(torch.eye(logits.size(-1), dtype=logits.dtype))
    return [LazyLogits(one, head) for one in logits]


@each
@pytest.mark.parametrize("k", [1, 5, 36, 37, 400])
def test_values_and_gradients_equal_the_oracle(make_pair, gradients, of, k):
    pair = make_pair(7, 37, rich=True)
    ours, oracle = (gradients(one, pair, TopKTeacher(of, k)) for one in (streamed_divergence, dense_divergence))
    assert_close(ours[0].divergence, oracle[0].divergence, rtol=1e-4, atol=2e-5)
    assert_close(ours[1], oracle[1], rtol=1e-4, atol=2e-5)


@each
@pytest.mark.parametrize("apart", [3.0, 1e-3, 0.0])
def test_top_k_divergence_is_between_0_and_the_full_one(of, apart):
    generator = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(50, 41, generator=generator)
    pair = rows(torch.stack([student, student + apart * torch.randn(50, 41, generator=generator)]))
    whole = streamed_divergence(*pair, of).divergence
    found = torch.stack([streamed_divergence(*pair, TopKTeacher(of, k)).divergence for k in (1, 4, 16, 40, 41)])
    assert found.min() >= 0
    assert (found.diff(dim=0) >= -1e-5).all()
    assert (found <= whole + 1e-5).all()
    assert_close(found[-1], whole, rtol=0, atol=0)
    assert apart or not found.any()


def test_top_k_divergence_needs_only_the_likeliest_tokens():
    student, teacher = torch.randn(2, 6, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    log_student, log_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    told, ids = log_teacher.topk(4)  # what such a teacher tells
    sides = log_student.gather(-1, ids), told
    q, p = (torch.cat([one.exp(), 1 - one.exp().sum(-1, keepdim=True)], dim=-1) for one in sides)
    found = dense_divergence(*rows(torch.stack([student, teacher])), TopKTeacher(ForwardKL(), 4)).divergence
    assert_close(found, (p * (p / q).log()).sum(-1).float())


def test_a_teacher_with_one_certain_token_has_no_rest_mass():
    certain = torch.full((2, 9), -200.0).scatter_(1, torch.tensor([[3], [5]]), 200.0)
    for of in (ForwardKL(), ReverseKL()):
        same = streamed_divergence(*rows(torch.stack([certain, certain])), TopKTeacher(of, 2)).divergence
        assert same.tolist() == [0.0, 0.0]
    hidden = torch.zeros(2, 9, requires_grad=True)
    head = OutputHead(torch.eye(9))
    found = streamed_divergence(LazyLogits(hidden, head), LazyLogits(certain, head), TopKTeacher(ForwardKL(), 2))
    assert_close(found.divergence.detach(), torch.full((2,), 9.0).log())
    (gradient,) = torch.autograd.grad(found.divergence.sum(), hidden)
    assert_close(gradient, torch.full((2, 9), 1 / 9) - (certain > 0).float())


class Own(Divergence):
    def value(self, log_student_RV, log_teacher_RV):
        return (log_student_RV - log_teacher_RV).abs().sum(-1)


@pytest.mark.parametrize(
    ("of", "k", "message"),
    [
        (ForwardKL(), 0, "top_k_teacher is 0, expected a number of tokens, at least 1"),
        (SampledReverseKL(), 4, "top_k_teacher is 4 with SampledReverseKL, which is not a sum over vocabulary entries"),
        (NegativeLogAcceptance(), 4, "top_k_teacher is 4 with NegativeLogAcceptance, which is not a sum"),
        (Own(), 4, "top_k_teacher is 4 with Own, which is not a sum over vocabulary entries: use"),
    ],
)
def test_top_k_of_divergences_without_buckets_is_refused(of, k, message):
    with pytest.raises(ValueError, match=message):
        TopKTeacher(of, k)


def test_a_bucket_is_not_clipped(make_pair):
    with pytest.raises(
        ValueError, match=r"TopKTeacher\(of=ForwardKL\(\), k=3\), which is not a sum over vocabulary entries"
    ):
        streamed_divergence(*make_pair(), TopKTeacher(ForwardKL(), 3), kl_clip=0.05)
