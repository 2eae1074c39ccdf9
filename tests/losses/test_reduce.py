"""Per-token values are summed by row, and the loss is divided by the weights of the step."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from trl_opsd.losses import PerToken, reduce

pytestmark = pytest.mark.quick

WEIGHTS = torch.tensor([[1, 0, 0.5], [0, 0, 0], [0, 2, 0]])


def per_token(values):
    values = torch.tensor(values, requires_grad=True)
    return PerToken(
        divergence=values,
        student_entropy=values.detach() * 10,
        teacher_entropy=values.detach() * 100,
        teacher_uniform=values > 3,
        clipped=(values < 3).float(),
        pulled=values.detach() / 2,
        same_first=(values > 1).float(),
        teacher_first=(values > 0).float(),
        importance=values.detach() / 4,
    )


def test_values_are_summed_over_the_tokens_of_each_row():
    parts = reduce(per_token([1.0, 2.0, 4.0]), WEIGHTS, num_items=None)
    assert parts.ROW_NAMES == (
        "weight",
        "divergence",
        "student_entropy",
        "teacher_entropy",
        "tokens",
        "teacher_uniform",
        "clipped",
        "pulled",
        "same_first",
        "teacher_first",
        "importance",
    )
    # divergences and what is added to them come weighted, entropies do not
    assert parts.rows.tolist() == [
        [1.5, 1.5, 20, 200, 2, 0, 2, 1.5, 1, 2, 0.75],
        [0] * 11,
        [2, 2, 80, 800, 1, 1, 0, 2, 1, 1, 1],
    ]
    assert not parts.rows.requires_grad


@pytest.mark.parametrize(("num_items", "loss"), [(None, 2.0), (14, 0.5), (torch.tensor(28), 0.25)])
def test_the_loss_is_divided_by_the_weights_of_the_whole_step(num_items, loss):
    tokens = per_token([1.0, 2.0, 4.0])
    parts = reduce(tokens, WEIGHTS, num_items)
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(loss)
    assert_close(tokens.divergence.grad, torch.full((3,), loss / 7))


@pytest.mark.parametrize("num_items", [None, 5])
def test_a_micro_batch_without_tokens_has_zero_loss_and_a_gradient(num_items):
    tokens = per_token([])
    parts = reduce(tokens, torch.zeros(2, 3), num_items)
    parts.loss.backward()
    assert parts.loss.item() == 0
    assert tokens.divergence.grad.shape == (0,)
    assert parts.rows.tolist() == [[0] * 11] * 2
