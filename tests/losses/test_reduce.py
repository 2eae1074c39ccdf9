"""Per-token values are summed by row, and the loss is divided by the weights of the step."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from trl_opsd.losses import PerToken, reduce

pytestmark = pytest.mark.quick

WEIGHTS = torch.tensor([[1, 0, 0.5], [0, 0, 0], [0, 2, 0]])


OPTIONAL = {
    "teacher_uniform": lambda value: value > 3,
    "clipped": lambda value: value < 3,
    "nll": lambda value: value / 4,
    "anchored": lambda value: value / 4,
    "same_first": lambda value: value > 1,
    "teacher_first": lambda value: value > 0,
    "importance": lambda value: value / 4,
    "gated": lambda value: value > 3,
    "sampler_kl": lambda value: value / 2,
    "sampler_known": lambda value: value > 1,
    "ranked": lambda value: value < 2,
    "top_shared": lambda value: value / 8,
    "top_mass": lambda value: value / 16,
    "accepted": lambda value: value / 16,
}
"""What a test has of a token, by its divergence."""


def per_token(values):
    values = torch.tensor(values, requires_grad=True)
    known = {name: function(values.detach()).float() for name, function in OPTIONAL.items()}
    entropies = {"student_entropy": values.detach() * 10, "teacher_entropy": values.detach() * 100}
    return PerToken(divergence=values, **entropies, **known)


def test_values_are_summed_over_the_tokens_of_each_row():
    authors = torch.tensor([[1, 1, 3]] * 3)
    parts = reduce(per_token([1.0, 2.0, 4.0]), WEIGHTS, num_items=None, authors=authors)
    rows = {name: parts.rows[:, number].tolist() for number, name in enumerate(parts.ROW_NAMES)}
    # divergences and what is added to them come weighted, entropies do not
    assert rows.pop("weight") == [1.5, 0, 2]
    assert rows.pop("divergence") == [1.5, 0, 2]
    assert rows.pop("student_entropy") == [20, 0, 80]
    assert rows.pop("teacher_entropy") == [200, 0, 800]
    assert rows.pop("tokens") == [2, 0, 1]
    by_author = {"student": [[1, 0, 2], [0.5, 0, 2], [1, 0, 1]], "dataset": [[0.5, 0, 0], [1, 0, 0], [1, 0, 0]]}
    for author, expected in by_author.items():
        assert [rows.pop(f"{name}_{author}") for name in ("weight", "divergence", "tokens")] == expected
    for name, of in OPTIONAL.items():
        assert rows.pop(name) == [of(1.0) + of(2.0), 0, of(4.0)], name
    assert not any(map(any, rows.values())), "where rows are parts, places are not known"
    assert not parts.rows.requires_grad


def naive(values, weights, lengths):
    """Sums of weights and divergences by place, one token after the other."""
    rows, taken = [], iter(values)
    for weights_C, length in zip(weights, lengths, strict=True):
        tenths = [[0.0, 0.0] for _ in range(10)]
        for place, weight in enumerate(weights_C):
            if weight:
                tenths[place * 10 // length][0] += weight
                tenths[place * 10 // length][1] += next(taken)
        rows.append([*(one[0] for one in tenths), *(one[1] for one in tenths)])
    return torch.tensor(rows)


def test_values_are_summed_by_place():
    generator = torch.Generator().manual_seed(0)
    lengths = [43, 1, 7, 10, 30, 0, 43]
    real = (torch.arange(43) < torch.tensor(lengths)[:, None]).long()
    weights = torch.rand(7, 43, generator=generator) * real
    weights[:, 3::4] = 0  # tool output, or not selected
    weights[6] = 0
    number = int((weights != 0).sum())
    values = torch.rand(number, generator=generator)
    tokens = PerToken(divergence=values, student_entropy=values, teacher_entropy=values)
    found = reduce(tokens, weights, None, real).rows[:, -20:]
    assert_close(found, naive(values.tolist(), weights.tolist(), lengths))
    assert found[:, :10].sum() > 20, "there was something to sum"


@pytest.mark.parametrize(("num_items", "loss"), [(None, 2.0), (14, 0.5), (torch.tensor(28), 0.25)])
def test_loss_is_divided_by_weights_of_the_whole_step(num_items, loss):
    tokens = per_token([1.0, 2.0, 4.0])
    parts = reduce(tokens, WEIGHTS, num_items)
    parts.loss.backward()
    assert parts.loss.item() == pytest.approx(loss)
    assert_close(tokens.divergence.grad, torch.full((3,), loss / 7))


@pytest.mark.parametrize("num_items", [None, 5])
def test_micro_batch_without_tokens_has_zero_loss_with_gradient(num_items):
    tokens = per_token([])
    parts = reduce(tokens, torch.zeros(2, 3), num_items, torch.ones(2, 3))
    parts.loss.backward()
    assert parts.loss.item() == 0
    assert tokens.divergence.grad.shape == (0,)
    assert parts.rows.abs().sum() == 0
