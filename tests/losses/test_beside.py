"""A third model beside student and teacher: what the target moves away from, and an anchor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_cost import STUDENT, TEACHER, TOKENS, VOCABULARY, Operations, counted_flops
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from trl_opsd.losses import (
    DIVERGENCES,
    ForwardKL,
    LazyLogits,
    OutputHead,
    ReferenceModel,
    ReverseKL,
    Sampled,
    SampledReverseKL,
    dense_divergence,
    streamed_divergence,
)
from trl_opsd.losses.elementwise import Finish
from trl_opsd.losses.target import target_

pytestmark = pytest.mark.quick

MADE = [make() for make in DIVERGENCES.values()]


def third(rows: int, width: int, tokens: int = 7, vocabulary: int = 37) -> LazyLogits:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(size, width, generator=generator) for size in (tokens, vocabulary))
    return LazyLogits(hidden, OutputHead(weight), temperature=1.1)


SET = {
    "contrast": ([ReferenceModel(third(1, 8), push=0.5)], None),
    "bounded contrast": ([ReferenceModel(third(1, 8), push=2.0, bound=1.5)], None),
    "anchor": ([ReferenceModel(third(2, 5), anchor=0.3)], ReverseKL()),
    "contrast, and away from its own anchor": (
        [ReferenceModel(third(1, 8), push=0.5), ReferenceModel(third(2, 5), push=0.25, anchor=0.3)],
        ReverseKL(),
    ),
    "both, and one that takes the teacher's place": (
        [ReferenceModel(third(1, 8), push=1.0, bound=3.0), ReferenceModel(third(2, 5), push=-1.0, anchor=0.3)],
        ForwardKL(),
    ),
}


@pytest.mark.parametrize("case", SET)
@pytest.mark.parametrize("divergence", MADE, ids=repr)
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
def test_values_and_gradients_equal_the_oracle(make_pair, gradients, divergence, rich, case):
    references, anchor = SET[case]
    generator = torch.Generator().manual_seed(3)
    nll_weight, weights = torch.randn(7, generator=generator), torch.rand(7, generator=generator)
    given = {
        "references": references,
        "anchor": anchor,
        "weights": weights,
        "sampled": Sampled(torch.arange(7), nll_weight),
    }
    expected, expected_gradients = gradients(dense_divergence, make_pair(rich=rich), divergence, **given)
    for chunk in (None, 3):
        found, its_gradients = gradients(
            streamed_divergence, make_pair(rich=rich), divergence, chunk_tokens=chunk, **given
        )
        for name in ("divergence", "teacher_entropy", "student_entropy", "nll", "same_first", "teacher_first"):
            assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=2e-5)
        if "anchor" in case or "place" in case:
            assert_close(found.anchored, expected.anchored, rtol=1e-4, atol=2e-5)
        else:
            assert found.anchored is expected.anchored is None
        assert_close(its_gradients, expected_gradients, rtol=1e-4, atol=2e-5)


def test_the_target_is_the_teachers_distribution_moved_away(make_pair):
    """Against a target that is written out: log-probabilities plus their bounded difference, renormalised."""
    student, teacher = make_pair()
    other = third(1, 8)
    logs = [
        (one.hidden @ one.head.weight.T / one.temperature).double().log_softmax(-1) for one in (student, teacher, other)
    ]
    gap = 2 * ((logs[1] - logs[2]) / 2).tanh()
    target = (logs[1] + 0.7 * gap).log_softmax(-1)
    found = streamed_divergence(student, teacher, ForwardKL(), references=[ReferenceModel(other, push=0.7, bound=2.0)])
    assert_close(found.divergence.double(), (target.exp() * (target - logs[0])).sum(-1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("excludes", [False, True])
def test_differences_are_limited_only_where_bias_may_exclude_tokens(make_pair, excludes):
    student, teacher = make_pair()
    bias = torch.zeros(37).index_fill(0, torch.tensor([0, 5]), -torch.inf) if excludes else None
    teacher, other = (
        replace(one, hidden=40 * one.hidden, head=replace(one.head, bias=given))
        for one, given in ((teacher, None), (third(1, 8), bias))
    )
    logs = []
    for one in (student, teacher, other):
        logits = (one.hidden @ one.head.weight.T / one.temperature).double()
        logs.append((logits if one.head.bias is None else logits + bias).log_softmax(-1))
    gap = logs[1] - logs[2]
    assert (gap.abs() > 80).any()
    target = (logs[1] + 0.1 * (gap.clamp(-80, 80) if excludes else gap)).log_softmax(-1)
    found = streamed_divergence(student, teacher, ForwardKL(), references=[ReferenceModel(other, push=0.1)])
    expected = (target.exp() * (target - logs[0])).sum(-1)
    assert_close(found.divergence.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bound", [None, 3.0])
def test_what_the_teacher_excludes_stays_excluded(make_pair, gradients, bound):
    student, teacher = make_pair()
    bias = torch.zeros(37).index_fill(0, torch.tensor([0, 5, 36]), -torch.inf)
    pair = student, replace(teacher, head=replace(teacher.head, bias=bias))
    also = third(1, 8)
    also = replace(also, head=replace(also.head, bias=bias.roll(1)))  # which excludes 0, 1 and 6
    given = {"references": [ReferenceModel(also, push=0.5, bound=bound)]}
    found, found_gradients = gradients(streamed_divergence, pair, ForwardKL(), **given)
    assert found.divergence.isfinite().all()
    assert all(one.isfinite().all() for one in found_gradients)
    with torch.no_grad():
        reverse = streamed_divergence(*pair, ReverseKL(), **given)
    assert (reverse.divergence == torch.inf).all(), "the student expects what is excluded"


@pytest.mark.parametrize(("case", "products"), [("contrast", TEACHER), ("anchor", STUDENT)])
def test_each_model_costs_one_product(make_pair, gradients, case, products):
    (one,), anchor = SET[case]
    references = [replace(one, logits=third(1, one.logits.hidden.size(1), TOKENS, VOCABULARY))]
    with counted_flops() as counter:
        gradients(streamed_divergence, make_pair(TOKENS, VOCABULARY), ForwardKL(), references=references, anchor=anchor)
    assert counter.get_total_flops() == 3 * STUDENT + TEACHER + products


def test_target_that_is_a_sum_costs_only_its_product(make_pair, gradients):
    def operations(*references):
        with Operations() as ran:
            gradients(
                streamed_divergence, make_pair(TOKENS, VOCABULARY), ForwardKL(), chunk_tokens=8, references=references
            )
        free = ("slice", "detach", "permute", "promote_types", "randn")  # views, dtypes, and the models themselves
        return {name: count for name, count in ran.count.items() if not any(one in name for one in free)}

    alone, references = operations(), operations(ReferenceModel(third(1, 8, TOKENS, VOCABULARY), push=0.5))
    alone["aten.addmm_.default"] += TOKENS // 8
    assert references == alone


class Bytes(TorchDispatchMode):
    """Counts what operations read and write of tensors that have at least so many elements."""

    def __init__(self, least):
        super().__init__()
        self.least, self.total = least, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        some = (one for one in (*args, *(kwargs or {}).values(), out) if isinstance(one, torch.Tensor))
        self.total += sum(one.nbytes for one in some if one.numel() >= self.least)
        return out


@pytest.mark.parametrize(
    ("bias", "bounds", "most"), [(False, [2.0], 56), (True, [None], 88), (False, [2.0, 2.0], 108)], ids=str
)
def test_eager_steps_of_a_target_move_few_bytes(bias, bounds, most):
    """Of a logit; whole tiles took 124 bytes, 146 with biases, and 200 with two models."""
    products = list(torch.randn(1 + len(bounds), 16, 4096))
    finishes = [Finish(torch.zeros(4096) if bias else None, None)] * len(products)
    with Bytes(products[0].numel()) as moved:
        target_(finishes, products, [(0.5, bound) for bound in bounds])
    assert moved.total <= most * products[0].numel()


def peak_bytes(compute):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    now = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(("vocabulary", "chunk"), [(2048, 128), (4096, 96)])
def test_memory_grows_by_tiles_of_models_not_added_up(make_pair, gradients, vocabulary, chunk):
    """What `trl-opsd plan` counts."""

    def peak(*references):
        pair = make_pair(256, vocabulary)
        return peak_bytes(
            lambda: gradients(streamed_divergence, pair, ReverseKL(), chunk_tokens=chunk, references=references)
        )

    contrast, origin = third(1, 8, 256, vocabulary), third(2, 5, 256, vocabulary)
    tiles = {
        (ReferenceModel(contrast, push=0.5),): 0,
        (ReferenceModel(contrast, push=0.5, bound=2.0),): 1,
        (ReferenceModel(contrast, push=0.5, bound=2.0), ReferenceModel(origin, push=0.25)): 2,
        (ReferenceModel(contrast, push=0.5), ReferenceModel(origin, push=0.25, anchor=0.3)): 2,
        (ReferenceModel(contrast, push=0.5, bound=2.0), ReferenceModel(origin, anchor=0.3)): 3,
    }
    alone = peak()
    grown = [(peak(*references) - alone) / (4 * chunk * vocabulary) for references in tiles]
    assert grown == pytest.approx(list(tiles.values()), abs=0.02)


def test_one_without_a_part_costs_nothing(make_pair, gradients):
    with counted_flops() as counter:
        gradients(
            streamed_divergence,
            make_pair(TOKENS, VOCABULARY),
            ForwardKL(),
            references=[ReferenceModel(third(1, 8, TOKENS, VOCABULARY))],
        )
    assert counter.get_total_flops() == 3 * STUDENT + TEACHER


@pytest.mark.refusal
def test_what_does_not_fit_is_refused(make_pair):
    sampled = Sampled(torch.arange(7))
    pair, few, narrow = make_pair(), third(1, 8, tokens=6), third(1, 8, vocabulary=36)
    with pytest.raises(ValueError, match=r"^beside\[0\] hidden states have shape \[6, 8\], expected \[N, H\] with 7"):
        streamed_divergence(*pair, ForwardKL(), references=[ReferenceModel(few, push=1.0)])
    with pytest.raises(
        ValueError, match=r"^vocabulary is None, but the student's head has 37 rows and the teacher's 36"
    ):
        streamed_divergence(*pair, ForwardKL(), references=[ReferenceModel(narrow, push=1.0)])
    with pytest.raises(ValueError, match=r"^SampledReverseKL cannot hold the student near an anchor"):
        streamed_divergence(
            *pair, SampledReverseKL(), sampled=sampled, references=[ReferenceModel(third(1, 8), anchor=1.0)]
        )
