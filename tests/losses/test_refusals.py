"""Inputs that cannot be compared are refused with what was given, what was expected and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch

from trl_opsd.losses import (
    DIVERGENCES,
    Divergence,
    ForwardKL,
    GeneralizedJSD,
    ReverseKL,
    dense_divergence,
    streamed_divergence,
)
from trl_opsd.losses.validation import prove_divergence

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_beta_at_or_beyond_its_limits_is_refused(beta):
    with pytest.raises(ValueError, match=rf"beta is {beta}, expected .* between 0 and 1: use ForwardKL\(\)"):
        GeneralizedJSD(beta)


def with_head(side, **changes):
    return replace(side, head=replace(side.head, **changes))


@pytest.mark.parametrize("compute", [streamed_divergence, dense_divergence])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s, t: (s, with_head(t, weight=torch.zeros(41, 8))),
            "student's head has 37 rows and the teacher's 41: pass",
        ),
        (
            lambda s, t: (s, replace(t, hidden=torch.zeros(6, 8))),
            r"teacher hidden states have shape \[6, 8\], expected \[N, H\] with 7 tokens",
        ),
        (
            lambda s, t: (replace(s, hidden=torch.zeros(2, 3, 5)), t),
            r"student hidden .* \[2, 3, 5\], expected \[N, H\]",
        ),
        (lambda s, t: (s, replace(t, temperature=0.0)), "teacher temperature is 0.0, expected a number above 0"),
    ],
    ids=["vocabulary", "tokens", "dimensions", "temperature"],
)
def test_incompatible_models_are_refused(make_pair, compute, change, message):
    with pytest.raises(ValueError, match=message):
        compute(*change(*make_pair()), ForwardKL())


@pytest.mark.parametrize("compute", [streamed_divergence, dense_divergence])
def test_weights_that_are_not_one_per_token_are_refused(make_pair, compute):
    with pytest.raises(ValueError, match=r"weights have shape \[6\], expected \[7\]: pass one per token"):
        compute(*make_pair(), ForwardKL(), torch.ones(6))


@pytest.mark.parametrize("compute", [streamed_divergence, dense_divergence])
@pytest.mark.parametrize("vocabulary", [0, 38])
def test_an_invalid_vocabulary_size_is_refused(make_pair, compute, vocabulary):
    with pytest.raises(ValueError, match=f"vocabulary is {vocabulary}, but .* 37 rows .* from 1 to 37"):
        compute(*make_pair(), ForwardKL(), vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda mine, theirs: (mine - theirs).sum(),
            r"returned shape \[\]: expected one divergence per row, \[3\]",
        ),
        (lambda mine, theirs: mine - theirs, r"returned shape \[3, 7\]"),
        (lambda mine, theirs: 0.0, "returned a float"),
        (lambda mine, theirs: (mine - theirs).sum(-1).detach(), "is not differentiable"),
    ],
)
def test_a_custom_divergence_returns_one_differentiable_number_per_row(value, message):
    class Mine(Divergence):
        def value(self, log_student_RV, log_teacher_RV):
            return value(log_student_RV, log_teacher_RV)

    logs = torch.randn(2, 3, 7).log_softmax(-1)
    with pytest.raises(ValueError, match=f"`Mine.value` {message}"):
        Mine().value_and_gradient(*logs, *logs.exp())
    if "differentiable" not in message:
        with pytest.raises(ValueError, match=f"`Mine.value` {message}"), torch.no_grad():
            Mine().value_alone(*logs, *logs.exp())


def reverse_kl(mine, theirs):
    return (mine.exp() * (mine - theirs)).sum(-1)


class Skewed(Divergence):
    """As in docs/extending.md, more or less."""

    def value(self, log_student_RV, log_teacher_RV):
        return reverse_kl(log_student_RV, torch.logaddexp(log_student_RV - 3.0, log_teacher_RV - 0.05))


class Analytic(Divergence):
    """A gradient of its own, which is right."""

    factor = 1.0

    def value(self, log_student_RV, log_teacher_RV):
        return 2 * reverse_kl(log_student_RV, log_teacher_RV)

    def value_and_gradient(self, *storage):
        value_R, gradient_RV = ReverseKL().value_and_gradient(*storage)
        return 2 * value_R, self.factor * 2 * gradient_RV


class WrongSign(Analytic):
    factor = -1.0


class OneWrongEntry(Analytic):
    def value_and_gradient(self, *storage):
        value_R, gradient_RV = super().value_and_gradient(*storage)
        gradient_RV[:, 3] += 1
        return value_R, gradient_RV


class OnlyValue(ReverseKL):
    def value(self, log_student_RV, log_teacher_RV):
        return reverse_kl(log_student_RV, log_teacher_RV) ** 2


class OverTheBatch(Divergence):
    def value(self, log_student_RV, log_teacher_RV):
        values_R = reverse_kl(log_student_RV, log_teacher_RV)
        return values_R / values_R.mean()


class HalfARoot(Divergence):
    """Its value is finite, its gradient NaN where the root is not taken."""

    def value(self, log_student_RV, log_teacher_RV):
        gap_RV = log_student_RV - log_teacher_RV
        return (log_student_RV.exp() * torch.where(gap_RV > 0, gap_RV.sqrt(), 0)).sum(-1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            WrongSign,
            r"`WrongSign.value_and_gradient`.*: gradients differ by \S+ at token id \d+, where",
        ),
        (OneWrongEntry, r"`OneWrongEntry.value_and_gradient`.*: gradients differ by \S+ at token id 3, where"),
        (
            OnlyValue,
            "`OnlyValue.value_and_gradient`, that of `ReverseKL`, does not match `OnlyValue.value`: values differ",
        ),
        (OverTheBatch, "`OverTheBatch.value` of a token depends on other tokens .values differ by"),
        (HalfARoot, "The gradient of `HalfARoot.value` is NaN or infinite"),
    ],
)
@pytest.mark.parametrize("vocabulary", [7, 20_000])
def test_a_divergence_that_contradicts_itself_is_refused(wrong, message, vocabulary):
    with pytest.raises(ValueError, match=f"^{message}"):
        prove_divergence(wrong(), vocabulary, torch.device("cpu"))


class Sampled(Divergence):
    """Looks at a few tokens only, at others each time."""

    def value(self, log_student_RV, log_teacher_RV):
        some = torch.randint(log_student_RV.size(-1), (5,))
        return reverse_kl(log_student_RV[:, some], log_teacher_RV[:, some])


@dataclass(frozen=True, eq=False)
class PerToken(Divergence):
    """Has a tensor as wide as the vocabulary."""

    factors_V: torch.Tensor

    def value(self, log_student_RV, log_teacher_RV):
        return (self.factors_V * (log_student_RV - log_teacher_RV) ** 2).sum(-1)


class Bounded(Divergence):
    """Flat for distributions that are far apart."""

    def value(self, log_student_RV, log_teacher_RV):
        return reverse_kl(log_student_RV, log_teacher_RV).clamp(max=0.1)


class Noisy(Divergence):
    """Draws for each row and token."""

    def value(self, log_student_RV, log_teacher_RV):
        gap_RV = (log_student_RV - log_teacher_RV) ** 2
        return (torch.randn_like(gap_RV) ** 2 * gap_RV).sum(-1)


class NoisyWrongSign(Noisy):
    def value_and_gradient(self, *storage):
        value_R, gradient_RV = super().value_and_gradient(*storage)
        return value_R, -gradient_RV


@pytest.mark.parametrize("vocabulary", [2, 259, 20_000])
def test_sound_divergences_pass_the_checks(vocabulary):
    named = [make() for make in DIVERGENCES.values()]
    for one in [*named, Skewed(), Analytic(), Bounded(), Noisy(), Sampled(), PerToken(torch.rand(vocabulary))]:
        doubts = prove_divergence(one, vocabulary, torch.device("cpu"))
        assert not doubts or (type(one) is Sampled and "is negative" in doubts[0])


def test_a_random_divergence_is_compared_with_its_definition():
    with pytest.raises(ValueError, match=r"^`NoisyWrongSign.value_and_gradient` does not match"):
        prove_divergence(NoisyWrongSign(), 7, torch.device("cpu"))


@pytest.mark.parametrize("vocabulary", [2, 259, 20_000])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda mine, theirs: -reverse_kl(mine, theirs), r"^`Mine.value` is negative, -"),
        (lambda mine, theirs: (mine.exp().detach() * (mine - theirs)).sum(-1), r"^The gradient of `Mine.value` is 0 "),
        (lambda mine, theirs: reverse_kl(mine, theirs).clamp(max=0) + 1, r"^The gradient of `Mine.value` is 0 "),
        (lambda mine, theirs: 9 + (mine.exp() * mine).sum(-1), r"^The gradient of .* does not depend on the teacher"),
        (
            lambda mine, theirs: 9 + (mine.exp() * mine - theirs).sum(-1),
            r"^The gradient of .* does not depend on the teacher",
        ),
    ],
    ids=["negative", "cancelled", "bounded", "no teacher", "a constant teacher"],
)
def test_suspicious_divergences_return_a_warning(value, words, vocabulary):
    class Mine(Divergence):
        def value(self, log_student_RV, log_teacher_RV):
            return value(log_student_RV, log_teacher_RV)

    (doubt,) = prove_divergence(Mine(), vocabulary, torch.device("cpu"))
    assert re.search(words, doubt)
