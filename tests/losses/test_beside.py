"""A third model beside student and teacher: what the target moves away from, and an anchor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heads import excluding, logits_of
from test_cost import STUDENT, TEACHER, TOKENS, VOCABULARY, counted_flops
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from trl_opsd.losses import (
    DIVERGENCES,
    ForwardKL,
    LazyLogits,
    OutputHead,
    ReferenceModel,
    ReverseKL,
    Sampled,
    streamed_divergence,
)

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
def test_values_and_gradients_equal_the_oracle(make_pair, assert_equals_oracle, divergence, rich, case):
    references, anchor = SET[case]
    generator = torch.Generator().manual_seed(3)
    nll_weight, weights = torch.randn(7, generator=generator), torch.rand(7, generator=generator)
    given = {"references": references, "anchor": anchor, "sampled": Sampled(torch.arange(7), nll_weight)}
    for chunk in (None, 3):
        found, _ = assert_equals_oracle(make_pair(rich=rich), divergence, weights, chunk, **given)
        assert (found.anchored is None) == (anchor is None)


@pytest.mark.parametrize(
    ("scale", "push", "bound", "excludes", "close"),
    [
        (1, 0.7, 2.0, False, {"rtol": 0, "atol": 2e-6}),
        (40, 0.1, None, False, {"rtol": 1e-5, "atol": 1e-5}),
        (40, 0.1, None, True, {"rtol": 1e-5, "atol": 1e-5}),
    ],
)
def test_the_target_is_the_teachers_distribution_moved_away(make_pair, scale, push, bound, excludes, close):
    """Log-probabilities plus their bounded difference, renormalised; limited where a bias may exclude tokens."""
    student, teacher = make_pair()
    teacher, other = (replace(one, hidden=scale * one.hidden) for one in (teacher, third(1, 8)))
    other = excluding(other, [0, 5]) if excludes else other
    logs = [logits_of(one).log_softmax(-1) for one in (student, teacher, other)]
    gap = logs[1] - logs[2]
    assert (gap.abs() > 80).any() == (scale > 1)
    gap = gap if bound is None else bound * (gap / bound).tanh()
    target = (logs[1] + push * (gap.clamp(-80, 80) if excludes else gap)).log_softmax(-1)
    references = [ReferenceModel(other, push=push, bound=bound)]
    found = streamed_divergence(student, teacher, ForwardKL(), references=references)
    assert_close(found.divergence.double(), (target.exp() * (target - logs[0])).sum(-1), **close)


@pytest.mark.parametrize("bound", [None, 3.0])
def test_what_the_teacher_excludes_stays_excluded(make_pair, gradients, bound):
    student, teacher = make_pair()
    pair = student, excluding(teacher, [0, 5, 36])
    given = {"references": [ReferenceModel(excluding(third(1, 8), [0, 1, 6]), push=0.5, bound=bound)]}
    found, found_gradients = gradients(streamed_divergence, pair, ForwardKL(), **given)
    assert found.divergence.isfinite().all()
    assert all(one.isfinite().all() for one in found_gradients)
    with torch.no_grad():
        reverse = streamed_divergence(*pair, ReverseKL(), **given)
    assert (reverse.divergence == torch.inf).all(), "the student expects what is excluded"


@pytest.mark.parametrize(
    ("width", "parts", "products"),
    [(8, {"push": 0.5}, TEACHER), (5, {"anchor": 0.3}, STUDENT), (8, {}, 0)],
    ids=["contrast", "anchor", "neither"],
)
def test_each_model_costs_one_product(make_pair, gradients, width, parts, products):
    references = [ReferenceModel(third(1, width, TOKENS, VOCABULARY), **parts)]
    with counted_flops() as counter:
        gradients(streamed_divergence, make_pair(TOKENS, VOCABULARY), ForwardKL(), references=references)
    assert counter.get_total_flops() == 3 * STUDENT + TEACHER + products


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
