"""What the sampled tokens add to the loss equals the oracle; the policy gradient has the mean of the reverse KL's."""

from __future__ import annotations

import pytest
import torch
from heads import excluding, lower, of_logits
from torch.testing import assert_close

from trl_opsd.losses import (
    ForwardKL,
    GeneralizedJSD,
    ReverseKL,
    Sampled,
    SampledReverseKL,
    dense_divergence,
    streamed_divergence,
)

pytestmark = pytest.mark.quick

every_objective = pytest.mark.parametrize(
    ("divergence", "clip"),
    [
        (ForwardKL(), None),
        (ReverseKL(), None),
        (ReverseKL(), 0.02),
        (GeneralizedJSD(0.3), None),
        (SampledReverseKL(), None),
        (SampledReverseKL(1.5), None),
        (SampledReverseKL(None), None),
        (SampledReverseKL(clip_min=0.2), None),
    ],
    ids=repr,
)


def sampled(tokens: int, vocabulary: int, *, nll_weight: bool = True, logprobs: bool = True) -> Sampled:
    """Tokens, pulls of both signs, and log-probabilities with which some importance weights are beyond a bound."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    pulls, logs = torch.randn(tokens, generator=generator), -9 * torch.rand(tokens, generator=generator) - 1
    return Sampled(ids, pulls if nll_weight else None, logs if logprobs else None)


@every_objective
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
@pytest.mark.parametrize(
    "given", [{"nll_weight": False, "logprobs": False}, {"logprobs": False}, {"nll_weight": False}, {}]
)
def test_values_and_gradients_of_sampled_tokens(make_pair, assert_equals_oracle, divergence, clip, rich, given):
    pair, weights = make_pair(11, 101, rich=rich), torch.linspace(0, 2, 11)
    found, _ = assert_equals_oracle(pair, divergence, weights, 4, 90, clip, sampled(11, 90, **given))
    if given.get("nll_weight", True):
        assert found.nll.abs().sum() > 1
    if isinstance(divergence, SampledReverseKL) and given.get("logprobs", True) and divergence.clip_max:
        assert (found.importance == divergence.clip_max).any()
        assert (found.importance < divergence.clip_max).any()
        assert found.gated.any() == (divergence.clip_min is not None)


@every_objective
def test_sampled_tokens_of_models_in_bfloat16(make_pair, gradients, divergence, clip):
    pair = tuple(lower(one, torch.bfloat16) for one in make_pair(11, 101))
    args = pair, divergence, None, 4, None, clip, sampled(11, 101)
    (found, grads), (expected, right) = (gradients(one, *args) for one in (streamed_divergence, dense_divergence))
    assert_close(found.divergence, expected.divergence, rtol=1e-3, atol=1e-3)
    for one, other in zip(grads, right, strict=True):
        assert one.dtype == torch.bfloat16
        # On a CPU products are in float32, so all that is rounded is the gradient itself.
        assert (one.float() - other.float()).abs().max() <= 2**-7 * other.abs().max()


@pytest.mark.parametrize("divergence", [ForwardKL(), SampledReverseKL()], ids=repr)
def test_upstream_gradients_of_sampled_tokens_may_differ(make_pair, assert_equals_oracle, divergence):
    args = make_pair(7, rich=True), divergence, torch.linspace(0.5, 2, 7), 3, None, None, sampled(7, 37)
    differ = {"upstream": lambda values: (values * torch.linspace(-1, 2, 7)).sum()}
    assert_equals_oracle(*args, **differ, atol=1e-4)


def test_a_sampled_token_that_a_model_excludes_is_infinite(make_pair):
    student, teacher = make_pair(4)
    of = Sampled(torch.tensor([5, 5, 5, 1]), nll_weight=torch.tensor([1.0, 0.0, -1.0, 1.0]))
    found = streamed_divergence(excluding(student, [5]), teacher, SampledReverseKL(None), sampled=of)
    assert found.nll[:3].tolist() == [torch.inf, 0.0, -torch.inf]
    assert found.nll[3].isfinite()
    found = streamed_divergence(student, excluding(teacher, [5]), SampledReverseKL(), sampled=Sampled(of.ids))
    assert found.divergence[:3].tolist() == [torch.inf] * 3
    assert found.divergence[3].isfinite()


@pytest.mark.parametrize(("of_student", "clip_min"), [(True, None), (False, None), (False, 0.5)])
def test_means_over_sampled_tokens_are_those_of_an_enumeration(gradients, of_student, clip_min):
    """Over all tokens by the sampler's probabilities: the reverse KL and its gradient, of tokens that count; also
    KL(sampler || student).
    """
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    student, teacher, other = logits.log_softmax(-1)
    sampler = student if of_student else other
    pair = [of_logits(one.float().expand(7, -1)) for one in (student, teacher)]
    counts = (student - sampler).exp() >= (clip_min or 0.0)
    assert (0 < counts.sum() < 7) == (clip_min is not None)
    advantage = student.exp() * (student - teacher) * counts
    expected = advantage - student.exp() * advantage.sum()
    for compute in (streamed_divergence, dense_divergence):
        of = Sampled(torch.arange(7), logprobs=None if of_student else sampler.float())
        args = pair, SampledReverseKL(None, clip_min=clip_min), sampler.exp().float(), None, None, None, of
        found, (hidden, *_) = gradients(compute, *args)
        assert_close(found.divergence.double().sum(), advantage.sum(), rtol=1e-5, atol=1e-7)
        assert_close(hidden.double().sum(0), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.gated == 0, counts)
        if not of_student:
            kl = (sampler.exp() * (sampler - student)).sum()
            assert_close((found.sampler_kl.double() * sampler.exp()).sum(), kl, rtol=1e-5, atol=0)


def test_tokens_whose_sampler_is_not_known_are_left_out(make_pair):
    of = Sampled(torch.arange(7), logprobs=torch.full((7,), -2.0).index_fill(0, torch.tensor([1, 4]), torch.nan))
    for compute in (streamed_divergence, dense_divergence):
        found = compute(*make_pair(), ForwardKL(), sampled=of)
        assert found.sampler_known.tolist() == [1, 0, 1, 1, 0, 1, 1]
        assert found.sampler_kl[[1, 4]].tolist() == [0, 0]
        assert (found.sampler_kl[[0, 2, 3, 5, 6]] > 0).all()


def test_first_choices_are_counted_where_they_agree():
    student = torch.tensor([[3.0, 1.0, 0.0], [0.0, 5.0, 1.0], [2.0, 2.0, 1.0]])  # the last has two of them
    teacher = torch.tensor([[2.0, 1.0, 0.0], [9.0, 8.0, 0.0], [0.0, 4.0, 1.0]])
    of = Sampled(torch.tensor([1, 0, 1]))
    found = streamed_divergence(of_logits(student), of_logits(teacher), ForwardKL(), sampled=of)
    assert found.same_first.tolist() == [1.0, 0.0, 1.0]
    assert found.teacher_first.tolist() == [0.0, 1.0, 1.0]
