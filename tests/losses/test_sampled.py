"""What the sampled tokens add to the loss equals the oracle; the policy gradient has the mean of the reverse KL's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from trl_opsd.losses import (
    ForwardKL,
    GeneralizedJSD,
    LazyLogits,
    OutputHead,
    ReverseKL,
    Sampled,
    SampledReverseKL,
    dense_divergence,
    streamed_divergence,
)

pytestmark = pytest.mark.quick

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
FIELDS = (
    *("divergence", "nll", "same_first", "teacher_first", "importance", "gated", "student_entropy"),
    *("sampler_kl", "sampler_known"),
)
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


def assert_same(ours, oracle, **tolerance):
    (per_token, grads), (expected, expected_grads) = ours, oracle
    for name in FIELDS:
        found, right = (getattr(one, name) for one in (per_token, expected))
        if found is right is None:  # no log-probabilities are known
            continue
        found, right = found.detach().float(), right.detach().float()
        assert_close(found, right, msg=lambda m, n=name: f"{n}: {m}", **tolerance)
    assert_close(grads, expected_grads, **tolerance)


class TestEqualsTheOracle:
    @every_objective
    @pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
    @pytest.mark.parametrize(
        "given", [{"nll_weight": False, "logprobs": False}, {"logprobs": False}, {"nll_weight": False}, {}]
    )
    def test_values_and_gradients_of_sampled_tokens(self, make_pair, gradients, divergence, clip, rich, given):
        pair, weights = make_pair(11, 101, rich=rich), torch.linspace(0, 2, 11)
        args = pair, divergence, weights, 4, 90, clip, sampled(11, 90, **given)
        ours, oracle = (gradients(compute, *args) for compute in (streamed_divergence, dense_divergence))
        assert_same(ours, oracle, **CLOSE)
        if given.get("nll_weight", True):
            assert oracle[0].nll.abs().sum() > 1
        if isinstance(divergence, SampledReverseKL) and given.get("logprobs", True) and divergence.clip_max:
            assert (oracle[0].importance == divergence.clip_max).any()
            assert (oracle[0].importance < divergence.clip_max).any()
            assert oracle[0].gated.any() == (divergence.clip_min is not None)

    @every_objective
    def test_sampled_tokens_of_models_in_bfloat16(self, make_pair, gradients, divergence, clip):
        pair = make_pair(11, 101)
        pair = tuple(
            replace(one, hidden=one.hidden.bfloat16(), head=OutputHead(one.head.weight.bfloat16())) for one in pair
        )
        args = pair, divergence, None, 4, None, clip, sampled(11, 101)
        (found, grads), (expected, right) = (gradients(one, *args) for one in (streamed_divergence, dense_divergence))
        assert_close(found.divergence, expected.divergence, rtol=1e-3, atol=1e-3)
        for one, other in zip(grads, right, strict=True):
            assert one.dtype == torch.bfloat16
            # On a CPU products are in float32, so all that is rounded is the gradient itself.
            assert (one.float() - other.float()).abs().max() <= 2**-7 * other.abs().max()

    @pytest.mark.parametrize("divergence", [ForwardKL(), SampledReverseKL()], ids=repr)
    def test_upstream_gradients_of_sampled_tokens_may_differ(self, make_pair, gradients, divergence):
        args = make_pair(7, rich=True), divergence, torch.linspace(0.5, 2, 7), 3, None, None, sampled(7, 37)
        differ = {"upstream": lambda values: (values * torch.linspace(-1, 2, 7)).sum()}
        ours, oracle = (gradients(compute, *args, **differ) for compute in (streamed_divergence, dense_divergence))
        assert_same(ours, oracle, rtol=1e-4, atol=1e-4)

    def test_sampled_ids_without_pull_change_no_loss(self, make_pair, gradients):
        pair, ids = make_pair(7, rich=True), sampled(7, 37, nll_weight=False, logprobs=False)
        without, with_ids = (gradients(streamed_divergence, pair, ReverseKL(), sampled=one) for one in (None, ids))
        assert torch.equal(without[0].divergence, with_ids[0].divergence)
        assert all(torch.equal(*each) for each in zip(without[1], with_ids[1], strict=True))
        assert without[0].teacher_first is None

    def test_a_sampled_token_that_a_model_excludes_is_infinite(self, make_pair):
        student, teacher = make_pair(4)
        bias = torch.zeros(37).index_fill_(0, torch.tensor([5]), -torch.inf)
        excluding = replace(student, head=replace(student.head, bias=bias))
        of = Sampled(torch.tensor([5, 5, 5, 1]), nll_weight=torch.tensor([1.0, 0.0, -1.0, 1.0]))
        found = streamed_divergence(excluding, teacher, SampledReverseKL(None), sampled=of)
        assert found.nll[:3].tolist() == [torch.inf, 0.0, -torch.inf]
        assert found.nll[3].isfinite()
        excluding = replace(teacher, head=replace(teacher.head, bias=bias))
        found = streamed_divergence(student, excluding, SampledReverseKL(), sampled=Sampled(of.ids))
        assert found.divergence[:3].tolist() == [torch.inf] * 3
        assert found.divergence[3].isfinite()


def test_mean_policy_gradient_is_the_reverse_kl_gradient():
    """Over all tokens of a small vocabulary, by their probabilities; also if another policy has sampled them."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = 7
    logits, teacher_logits, other_logits = torch.randn(3, vocabulary, generator=generator, dtype=torch.float64)
    head = OutputHead(torch.eye(vocabulary, dtype=torch.float64))
    teacher = LazyLogits(teacher_logits.expand(vocabulary, -1), head)
    ids = torch.arange(vocabulary)

    def found(divergence, weights, of):
        hidden = logits.clone().requires_grad_()
        student = LazyLogits(hidden.expand(vocabulary, -1), head)
        value = dense_divergence(student, teacher, divergence, weights, sampled=of).divergence
        return value.detach(), torch.autograd.grad(value.sum(), hidden)[0]

    uniform = torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64)
    value, gradient = found(ReverseKL(), uniform, None)
    for sampler, logprobs in ((logits, False), (other_logits, True)):
        probabilities = sampler.softmax(0)
        of = Sampled(ids, logprobs=probabilities.log() if logprobs else None)
        estimate, mean = found(SampledReverseKL(None), probabilities, of)
        assert_close(mean, gradient, rtol=1e-7, atol=1e-9)
        assert_close(estimate.sum(), value.sum(), rtol=1e-6, atol=1e-7)


def test_means_over_sampled_tokens_are_those_of_an_enumeration(gradients):
    """Over all tokens by the sampler's probabilities: KL(sampler || student), and the gradient of tokens that count."""
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (student, teacher, sampler), ids = logits.log_softmax(-1), torch.arange(7)
    head = OutputHead(torch.eye(7))
    pair = [LazyLogits(one.float().expand(7, -1), head) for one in (student, teacher)]
    kl = (sampler.exp() * (sampler - student)).sum()
    counts = (student - sampler).exp() >= 0.5
    assert 0 < counts.sum() < 7
    advantage = student.exp() * (student - teacher) * counts
    expected = advantage - student.exp() * advantage.sum()
    for compute in (streamed_divergence, dense_divergence):
        of = Sampled(ids, logprobs=sampler.float())
        args = pair, SampledReverseKL(None, clip_min=0.5), sampler.exp().float(), None, None, None, of
        found, (hidden, *_) = gradients(compute, *args)
        assert_close((found.sampler_kl.double() * sampler.exp()).sum(), kl, rtol=1e-5, atol=0)
        assert_close(found.divergence.double().sum(), advantage.sum(), rtol=1e-5, atol=1e-7)
        assert_close(hidden.double().sum(0), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.gated == 0, counts)


def test_tokens_whose_sampler_is_not_known_are_left_out(make_pair):
    of = Sampled(torch.arange(7), logprobs=torch.full((7,), -2.0).index_fill(0, torch.tensor([1, 4]), torch.nan))
    for compute in (streamed_divergence, dense_divergence):
        found = compute(*make_pair(), ForwardKL(), sampled=of)
        assert found.sampler_known.tolist() == [1, 0, 1, 1, 0, 1, 1]
        assert found.sampler_kl[[1, 4]].tolist() == [0, 0]
        assert (found.sampler_kl[[0, 2, 3, 5, 6]] > 0).all()


def test_the_pull_is_cross_entropy_with_the_sampled_token(make_pair):
    student, teacher = make_pair(6)
    hidden = student.hidden.requires_grad_()
    of = Sampled(torch.randint(37, (6,), generator=torch.Generator().manual_seed(1)), torch.full((6,), 0.7))
    one = streamed_divergence(student, teacher, ForwardKL(), sampled=of).divergence.sum()
    other = streamed_divergence(student, teacher, ForwardKL()).divergence.sum()
    expected = 0.7 * torch.nn.functional.cross_entropy(hidden @ student.head.weight.T, of.ids, reduction="sum")
    assert_close(one - other, expected)
    found, right = (torch.autograd.grad(loss, hidden)[0] for loss in (one - other, expected))
    assert_close(found, right, rtol=1e-4, atol=1e-5)


class TestFirstChoices:
    """The likeliest token of each model, and the sampled one."""

    LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 5.0, 1.0], [2.0, 2.0, 1.0]])
    OF_TEACHER = torch.tensor([[2.0, 1.0, 0.0], [9.0, 8.0, 0.0], [0.0, 4.0, 1.0]])

    def test_first_choices_are_counted_where_they_agree(self):
        head = OutputHead(torch.eye(3))
        sides = LazyLogits(self.LOGITS, head), LazyLogits(self.OF_TEACHER, head)
        found = streamed_divergence(*sides, ForwardKL(), sampled=Sampled(torch.tensor([1, 0, 1])))
        assert found.same_first.tolist() == [1.0, 0.0, 1.0]  # the student of the last row has two of them
        assert found.teacher_first.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (None, "SampledReverseKL needs sampled tokens: pass `sampled="),
        (Sampled(torch.zeros(6, dtype=torch.int64)), r"sampled ids have shape \[6\], expected \[7\]"),
        (Sampled(torch.full((7,), 37)), "index 37 is out of bounds"),
        (Sampled(torch.full((7,), -100)), "index -100 is out of bounds"),
        (Sampled(torch.arange(7), nll_weight=torch.ones(1)), r"sampled nll_weight have shape \[1\], expected \[7\]"),
        (Sampled(torch.arange(7), logprobs=torch.ones(7, 1)), r"sampled logprobs have shape \[7, 1\]"),
    ],
)
@pytest.mark.parametrize("compute", [streamed_divergence, dense_divergence])
def test_mismatched_sampled_tokens_are_refused(make_pair, compute, of, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        compute(*make_pair(), SampledReverseKL(), sampled=of)


def test_the_policy_gradient_is_not_clipped_by_entries(make_pair):
    with pytest.raises(ValueError, match=r"with SampledReverseKL\(.*\), which is not a sum over vocabulary entries"):
        streamed_divergence(*make_pair(), SampledReverseKL(), kl_clip=0.05, sampled=sampled(7, 37))


def test_the_policy_gradient_has_no_value_of_distributions(make_pair):
    with pytest.raises(ValueError, match=r"only for a sampled token.*use ReverseKL\(\)"):
        SampledReverseKL().value(torch.zeros(1, 3), torch.zeros(1, 3))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_of_importance_weights_is_above_0(bound):
    with pytest.raises(ValueError, match=f"clip_max is {bound}, expected a number above 0, or None"):
        SampledReverseKL(bound)


@pytest.mark.parametrize("bound", [0.0, 3.0, float("nan")])
def test_a_gate_of_importance_weights_is_below_their_bound(bound):
    with pytest.raises(ValueError, match=f"clip_min is {bound}, expected a number above 0 and below clip_max, or None"):
        SampledReverseKL(clip_min=bound)
