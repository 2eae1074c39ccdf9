"""Inputs that cannot be compared, and divergences of a user that contradict themselves, are refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from test_beside import third

from trl_opsd.losses import (
    DIVERGENCES,
    Divergence,
    ForwardKL,
    GeneralizedJSD,
    NegativeLogAcceptance,
    ReferenceModel,
    ReverseKL,
    Sampled,
    SampledReverseKL,
    TopKTeacher,
    dense_divergence,
    streamed_divergence,
)
from trl_opsd.losses.validation import prove_divergence

pytestmark = pytest.mark.quick
NAN = float("nan")


def of_user(value, gradient=None):
    """A class with this value, and a gradient that this function makes of the right one."""

    class Mine(Divergence):
        def value(self, log_student_RV, log_teacher_RV):
            return value(log_student_RV, log_teacher_RV)

    if gradient is not None:
        right = Mine.value_and_gradient
        Mine.value_and_gradient = lambda self, *storage: gradient(*right(self, *storage))
    return Mine


def reverse_kl(mine, theirs):
    return (mine.exp() * (mine - theirs)).sum(-1)


OWN = of_user(reverse_kl)()


@pytest.mark.parametrize(
    ("make", "given", "named"),
    [
        *((GeneralizedJSD, {"beta": one}, f"beta is {one}") for one in (0.0, 1.0, -0.1, 1.5, NAN)),
        *((SampledReverseKL, {"clip_max": one}, "expected 0 < clip_min < clip_max") for one in (0.0, -1.0, NAN)),
        *((SampledReverseKL, {"clip_min": one}, "expected 0 < clip_min < clip_max") for one in (0.0, 3.0, NAN)),
        (TopKTeacher, {"of": ForwardKL(), "k": 0}, "top_k_teacher is 0"),
        *(
            (TopKTeacher, {"of": one, "k": 4}, f"top_k_teacher is 4 with {type(one).__name__}")
            for one in (SampledReverseKL(), NegativeLogAcceptance(), OWN)
        ),
    ],
)
def test_settings_of_a_divergence_out_of_range_are_refused(make, given, named):
    with pytest.raises(ValueError, match=named):
        make(**given)


def with_rows(side, rows):
    return replace(side, head=replace(side.head, weight=torch.zeros(rows, side.hidden.size(1))))


def with_hidden(side, *shape):
    return replace(side, hidden=torch.zeros(shape))


IDS = torch.arange(7)


@pytest.mark.parametrize("compute", [streamed_divergence, dense_divergence])
@pytest.mark.parametrize(
    ("divergence", "given", "named"),
    [
        (ForwardKL(), {"teacher": partial(with_rows, rows=41)}, "vocabulary is None"),
        (ForwardKL(), {"teacher": lambda side: with_hidden(side, 6, 8)}, "teacher hidden states"),
        (ForwardKL(), {"student": lambda side: with_hidden(side, 2, 3, 5)}, "student hidden states"),
        (ForwardKL(), {"teacher": partial(replace, temperature=0.0)}, r"teacher temperature is 0\.0"),
        (ForwardKL(), {"weights": torch.ones(6)}, "weights have shape"),
        *((ForwardKL(), {"vocabulary": one}, f"vocabulary is {one}") for one in (0, 38)),
        *((ForwardKL(), {"kl_clip": one}, f"kl_clip is {one}") for one in (0.0, -1.0, NAN)),
        (OWN, {"kl_clip": 0.05}, r"kl_clip is 0\.05 with Mine"),
        (TopKTeacher(ForwardKL(), 3), {"kl_clip": 0.05}, r"kl_clip is 0\.05 with TopKTeacher"),
        (SampledReverseKL(), {"kl_clip": 0.05, "sampled": Sampled(IDS)}, r"kl_clip is 0\.05 with SampledReverseKL"),
        (SampledReverseKL(), {}, "SampledReverseKL needs sampled tokens"),
        (SampledReverseKL(), {"sampled": Sampled(IDS[:6])}, "sampled ids have shape"),
        (SampledReverseKL(), {"sampled": Sampled(IDS + 31)}, "index 37 is out of bounds"),
        (SampledReverseKL(), {"sampled": Sampled(IDS - 100)}, "is out of bounds"),
        (ForwardKL(), {"sampled": Sampled(IDS, nll_weight=torch.ones(1))}, "sampled nll_weight have shape"),
        (ForwardKL(), {"sampled": Sampled(IDS, logprobs=torch.ones(7, 1))}, "sampled logprobs have shape"),
        (ForwardKL(), {"references": [ReferenceModel(third(1, 8, tokens=6), push=1.0)]}, r"beside\[0\] hidden states"),
        (ForwardKL(), {"references": [ReferenceModel(third(1, 8, vocabulary=36), push=1.0)]}, "vocabulary is None"),
        (
            SampledReverseKL(),
            {"sampled": Sampled(IDS), "references": [ReferenceModel(third(1, 8), anchor=1.0)]},
            "SampledReverseKL cannot hold the student near an anchor",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make_pair, compute, divergence, given, named):
    given, (student, teacher) = dict(given), make_pair()
    pair = given.pop("student", replace)(student), given.pop("teacher", replace)(teacher)
    with pytest.raises((ValueError, RuntimeError), match=named):
        compute(*pair, divergence, **given)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda mine, theirs: (mine - theirs).sum(), r"returned shape \[\]"),
        (lambda mine, theirs: mine - theirs, r"returned shape \[3, 7\]"),
        (lambda mine, theirs: 0.0, "returned a float"),
        (lambda mine, theirs: (mine - theirs).sum(-1).detach(), "is not differentiable"),
    ],
)
def test_a_custom_divergence_returns_one_differentiable_number_per_row(value, named):
    logs, mine = torch.randn(2, 3, 7).log_softmax(-1), of_user(value)()
    with pytest.raises(ValueError, match=f"`Mine.value` {named}"):
        mine.value_and_gradient(*logs, *logs.exp())
    if "differentiable" not in named:
        with pytest.raises(ValueError, match=f"`Mine.value` {named}"), torch.no_grad():
            mine.value_alone(*logs, *logs.exp())


# ---- Divergences of the user's own: what they compute, compared with their definition --------------------------------


class OnlyValue(ReverseKL):
    def value(self, log_student_RV, log_teacher_RV):
        return reverse_kl(log_student_RV, log_teacher_RV) ** 2


def over_the_batch(mine, theirs):
    values_R = reverse_kl(mine, theirs)
    return values_R / values_R.mean()


def half_a_root(mine, theirs):
    """Its value is finite, its gradient NaN where the root is not taken."""
    gap_RV = mine - theirs
    return (mine.exp() * torch.where(gap_RV > 0, gap_RV.sqrt(), 0)).sum(-1)


def one_wrong_entry(value_R, gradient_RV):
    return value_R, gradient_RV.index_add(1, torch.tensor([3]), torch.ones(len(value_R), 1))


def noisy(mine, theirs):
    """Draws for each row and token."""
    gap_RV = (mine - theirs) ** 2
    return (torch.randn_like(gap_RV) ** 2 * gap_RV).sum(-1)


def of_a_few(mine, theirs):
    """Looks at a few tokens only, at others each time."""
    some = torch.randint(mine.size(-1), (5,))
    return reverse_kl(mine[:, some], theirs[:, some])


def negated(value_R, gradient_RV):
    return value_R, -gradient_RV


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (of_user(reverse_kl, negated), r"`Mine.value_and_gradient`.*: gradients differ by \S+ at token id \d+,"),
        (of_user(reverse_kl, one_wrong_entry), r"`Mine.value_and_gradient`.*: gradients differ by \S+ at token id 3,"),
        (of_user(noisy, negated), r"`Mine.value_and_gradient` does not match"),
        (OnlyValue, "`OnlyValue.value_and_gradient`, that of `ReverseKL`, does not match `OnlyValue.value`: values"),
        (of_user(over_the_batch), "`Mine.value` of a token depends on other tokens"),
        (of_user(half_a_root), "The gradient of `Mine.value` is NaN or infinite"),
    ],
)
@pytest.mark.parametrize("vocabulary", [7, 20_000])
def test_a_divergence_that_contradicts_itself_is_refused(wrong, named, vocabulary):
    with pytest.raises(ValueError, match=f"^{named}"):
        prove_divergence(wrong(), vocabulary, torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class PerToken(Divergence):
    """Has a tensor as wide as the vocabulary."""

    factors_V: torch.Tensor

    def value(self, log_student_RV, log_teacher_RV):
        return (self.factors_V * (log_student_RV - log_teacher_RV) ** 2).sum(-1)


SOUND = {
    "like that of docs/extending.md": of_user(
        lambda mine, theirs: reverse_kl(mine, torch.logaddexp(mine - 3.0, theirs - 0.05))
    ),
    "a gradient of its own": of_user(reverse_kl, lambda value_R, gradient_RV: (value_R, 1 * gradient_RV)),
    "flat far apart": of_user(lambda mine, theirs: reverse_kl(mine, theirs).clamp(max=0.1)),
    "noisy": of_user(noisy),
}


@pytest.mark.parametrize("vocabulary", [2, 259, 20_000])
def test_sound_divergences_pass_the_checks(vocabulary):
    sound = [make() for make in (*DIVERGENCES.values(), *SOUND.values())]
    for one in (*sound, PerToken(torch.rand(vocabulary))):
        assert prove_divergence(one, vocabulary, torch.device("cpu")) == []
    doubts = prove_divergence(of_user(of_a_few)(), vocabulary, torch.device("cpu"))
    assert not doubts or "is negative" in doubts[0]


@pytest.mark.parametrize("vocabulary", [2, 259, 20_000])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda mine, theirs: -reverse_kl(mine, theirs), "^`Mine.value` is negative, -"),
        (lambda mine, theirs: (mine.exp().detach() * (mine - theirs)).sum(-1), "^The gradient of `Mine.value` is 0 "),
        (lambda mine, theirs: reverse_kl(mine, theirs).clamp(max=0) + 1, "^The gradient of `Mine.value` is 0 "),
        (lambda mine, theirs: 9 + (mine.exp() * mine).sum(-1), "does not depend on the teacher"),
        (lambda mine, theirs: 9 + (mine.exp() * mine - theirs).sum(-1), "does not depend on the teacher"),
    ],
    ids=["negative", "cancelled", "bounded", "no teacher", "a constant teacher"],
)
def test_suspicious_divergences_return_a_warning(value, words, vocabulary):
    (doubt,) = prove_divergence(of_user(value)(), vocabulary, torch.device("cpu"))
    assert re.search(words, doubt)
