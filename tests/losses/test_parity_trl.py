"""The numbers equal TRL's up to rounding, so that a change of trainer keeps the curves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from trl_opsd.losses import ForwardKL, GeneralizedJSD, PerToken, ReverseKL, dense_divergence, streamed_divergence

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
