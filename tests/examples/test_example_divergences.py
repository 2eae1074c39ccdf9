"""The divergences of `examples/divergences.py` are those of their papers, and pass the trainer's proof."""

from __future__ import annotations

import pytest
import torch
from divergences import AdaptiveKL, AlphaDivergence, EntropyAwareKL
from support import tiny

from trl_opsd.losses import ForwardKL, ReverseKL
from trl_opsd.losses.validation import prove_divergence

STUDENT, TEACHER = torch.tensor(
    [[[0.1, 0.2, 0.3, 0.4], [0.25] * 4], [[0.5, 0.25, 0.15, 0.1], [0.94, 0.02, 0.02, 0.02]]], dtype=torch.float64
)
FORWARD, REVERSE = (one.value(STUDENT.log(), TEACHER.log()) for one in (ForwardKL(), ReverseKL()))
SHARES = torch.tensor([0.4 / 0.9, 0.69 / 1.38], dtype=torch.float64)
"""Of the teacher's likeliest token, which alone is the head, in all differences."""


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (EntropyAwareKL(), REVERSE + FORWARD * torch.tensor([1.0, 0.0])),
        (AdaptiveKL(), SHARES * FORWARD + (1 - SHARES) * REVERSE),
        (AlphaDivergence(), 2 * (STUDENT.sqrt() - TEACHER.sqrt()).square().sum(-1)),
    ],
    ids=str,
)
def test_values_are_those_of_the_paper_and_training_takes_them(make_trainer, divergence, expected):
    torch.testing.assert_close(divergence.value(STUDENT.log(), TEACHER.log()), expected)
    assert prove_divergence(divergence, 50, torch.device("cpu")) == []
    trainer = make_trainer(divergence=divergence, max_steps=1)
    trainer.train()
    assert 0 < tiny.logged(trainer, "loss")[0] < 20


@pytest.mark.parametrize(("alpha", "expected"), [(1e-6, REVERSE), (1 - 1e-6, FORWARD)])
def test_alpha_is_between_both_directions(alpha, expected):
    torch.testing.assert_close(AlphaDivergence(alpha).value(STUDENT.log(), TEACHER.log()), expected, rtol=0, atol=1e-5)
