"""Per-token numbers find their rows again, and the loss its denominator."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from trl_opsd.losses import PerToken, reduce

MASK = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 2, 0]])


def per_token(values):
    values = torch.tensor(values, requires_grad=True)
    return PerToken(divergence=values, student_entropy=values.detach() * 10, teacher_entropy=values.detach() * 100)


def test_sums_belong_to_the_row_of_their_tokens():
    parts = reduce(per_token([1.0, 2.0, 4.0]), MASK, num_items=None)
    assert parts.ROW_NAMES == ("tokens", "divergence", "student_entropy", "teacher_entropy")
    assert parts.rows.tolist() == [[2, 3, 30, 300], [0, 0, 0, 0], [1, 4, 40, 400]]
    assert not parts.rows.requires_grad


@pytest.mark.parametrize(("num_items", "loss"), [(None, 7 / 3), (14, 0.5), (torch.tensor(28), 0.25)])
def test_the_loss_is_the_sum_over_the_tokens_of_the_whole_step(num_items, loss):
    tokens = per_token([1.0, 2.0, 4.0])
    parts = reduce(tokens, MASK, num_items)
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(loss)
    assert_close(tokens.divergence.grad, torch.full((3,), loss / 7))


@pytest.mark.parametrize("num_items", [None, 5])
def test_a_micro_batch_without_tokens_has_loss_zero_and_still_a_gradient(num_items):
    tokens = per_token([])
    parts = reduce(tokens, torch.zeros(2, 3), num_items)
    parts.loss.backward()
    assert parts.loss.item() == 0
    assert tokens.divergence.grad.shape == (0,)
    assert parts.rows.tolist() == [[0] * 4] * 2
