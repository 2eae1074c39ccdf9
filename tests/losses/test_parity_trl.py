"""The numbers equal TRL's up to rounding, so that a change of trainer keeps the curves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from iw_opd import WeighedAhead
from torch import nn
from torch.testing import assert_close

from trl_opsd.losses import (
    ForwardKL,
    GeneralizedJSD,
    OutputHead,
    PerToken,
    ReverseKL,
    SampledReverseKL,
    dense_divergence,
    streamed_divergence,
)
from trl_opsd.losses.objective import Objective
from trl_opsd.teacher.comparison import Comparison, compared, tokens_by_teacher
from trl_opsd.types import Rollout, RowTargets, TeacherTargets

pytestmark = pytest.mark.quick

chunked = pytest.importorskip("trl.kernels.chunked_divergence")


def trl_divergence(student, teacher, beta):
    heads = student.head, teacher.head
    sides = (one for side in (student, teacher) for one in (side.hidden, side.head.weight, side.head.bias))
    settings = (one for head in heads for one in (head.scale, head.softcap))
    found = chunked.ChunkedDivergenceFunction.apply(*sides, beta, student.temperature, *settings)
    return PerToken(divergence=found[0], student_entropy=found[1], teacher_entropy=found[1])


@pytest.mark.parametrize(
    ("divergence", "beta"),
    [(ForwardKL(), 0.0), (ReverseKL(), 1.0), (GeneralizedJSD(0.5), 0.5), (GeneralizedJSD(0.2), 0.2)],
)
@pytest.mark.parametrize("rich", [False, True], ids=["plain", "bias-scale-cap-temperature"])
def test_values_entropy_and_gradients_equal_trls(make_pair, gradients, divergence, beta, rich):
    student, teacher = make_pair(13, 101, rich=rich)
    pair = student, replace(teacher, temperature=student.temperature)  # TRL has one temperature for both
    ours, grads = gradients(streamed_divergence, pair, divergence, upstream=torch.Tensor.mean)
    theirs, expected = gradients(trl_divergence, pair, beta, upstream=torch.Tensor.mean)
    assert_close(ours.divergence, theirs.divergence, rtol=1e-4, atol=1e-5)
    assert_close(ours.student_entropy, theirs.student_entropy, rtol=1e-4, atol=1e-5)
    assert_close(grads, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("divergence", "beta"), [(ForwardKL(), 0.0), (ReverseKL(), 1.0), (GeneralizedJSD(0.5), 0.5)], ids=repr
)
def test_rounding_over_large_vocabularies_is_as_small_as_trls(make_pair, gradients, divergence, beta):
    pair = make_pair(8, 50_021)
    _, truth = gradients(dense_divergence, pair, divergence)
    _, ours = gradients(streamed_divergence, pair, divergence)
    _, theirs = gradients(trl_divergence, pair, beta)
    errors, trl_errors = ([(a - b).norm() for a, b in zip(got, truth, strict=True)] for got in (ours, theirs))
    assert all(error <= 2 * other for error, other in zip(errors, trl_errors, strict=True)), (errors, trl_errors)


@pytest.mark.parametrize("sampler", ["not known", "the student", "another"])
@pytest.mark.parametrize("trains_head", [True, False])
def test_weights_by_what_follows_give_the_gradient_of_trls_iw_opd(sampler, trains_head):
    """TRL's in float64; where the sampler is another, with the student's log ratio and an importance weight."""
    trainer = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer").IWOPDTrainer
    draw = torch.Generator().manual_seed(0)
    hidden, theirs = (torch.randn(3, 9, 6, generator=draw) for _ in range(2))
    head, teacher_head = (OutputHead(torch.randn(17, 6, generator=draw)) for _ in range(2))
    ids, weights = torch.randint(17, (3, 9), generator=draw), torch.ones(3, 9)
    weights[0, 5:], weights[1, [0, 3]], weights[2, 1:] = 0, 0, 0
    own, told = (
        (states.double() @ side.weight.double().T / 1.3).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        for states, side in ((hidden, head), (theirs, teacher_head))
    )
    drawn = own - torch.rand(3, 9, generator=draw) if sampler == "another" else own
    known = None if sampler == "not known" else drawn

    settings = {"temperature": 1.3, "iw_opd_gamma": 0.5, "iw_opd_epsilon": 1e-8}
    host = SimpleNamespace(**settings, model=nn.Module(), _metrics={"train": defaultdict(list)})
    logits = (hidden.double() @ head.weight.double().T).requires_grad_()
    labels = ids.masked_fill(weights == 0, -100)
    trainer._compute_iw_opd_loss(host, logits, ids, labels, told, known, weights.sum()).backward()
    expected = logits.grad * ((own - drawn).exp() * (told - own) / (told - drawn))[..., None]

    rows = {"completion_ids": ids, "completion_mask": ids + 1, "weights": weights}
    rollout = Rollout(**rows, prompt_ids=ids, prompt_mask=ids, logprobs=None if known is None else known.float())
    targets = TeacherTargets.by_row([RowTargets(one, torch.arange(9)) for one in theirs], 9)
    given = {"divergence": SampledReverseKL(clip_max=None), "factors": WeighedAhead().factors}
    objective = Objective(**given, temperatures=(1.3, 1.3))
    shares = tokens_by_teacher([teacher_head], targets, weights)
    hidden, weight = hidden.requires_grad_(), head.weight.requires_grad_(trains_head)
    found = compared(Comparison(rollout, targets, shares, hidden), head, [teacher_head], weights.sum(), objective)
    found.loss.backward()
    assert_close(hidden.grad.double(), expected @ weight.detach().double(), rtol=1e-4, atol=1e-6)
    if trains_head:
        of_head = expected.flatten(0, 1).T @ hidden.detach().double().flatten(0, 1)
        assert_close(weight.grad.double(), of_head, rtol=1e-4, atol=1e-6)
    if sampler != "another":
        (advantage,) = host._metrics["train"]["iw_opd/mean_advantage"]
        assert float(found.loss.detach()) == pytest.approx(-advantage, rel=1e-5)
