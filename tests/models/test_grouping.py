"""Rows of similar length are read together: each row once, within the budget, and with little padding."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from support import tiny

from trl_opsd.models.grouping import cheapest_groups, equal_groups, even_groups, fewest_groups
from trl_opsd.models.padding import PADDED
from trl_opsd.teacher import frozen

TO_SIX = [
    way for way in itertools.product(range(6), repeat=6) if all(way[i] <= max((-1, *way[:i])) + 1 for i in range(6))
]
"""Each way to split six rows, once."""
LENGTHS = [random.Random(seed).choices(range(1, 200), k=count) for seed, count in enumerate((1, 2, 3, 7, 12, 33))]


def tokens(lengths: list[int], group: list[int], packed: bool) -> int:
    """Tokens that are read, padding included."""
    each = [lengths[row] for row in group]
    return sum(each) if packed else len(each) * max(each)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
class TestGroups:
    @pytest.mark.parametrize("budget", [1, 100, 250, 10_000])
    def test_groups_stay_within_a_budget_that_no_row_exceeds_alone(self, lengths, packed, budget):
        groups = fewest_groups(lengths, lambda tokens, *_: tokens <= budget, packed)
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
        assert all(len(group) == 1 or tokens(lengths, group, packed) <= budget for group in groups)
        if budget == 1:
            assert len(groups) == len(lengths)
        if budget == 10_000:
            assert len(groups) == 1

    @pytest.mark.parametrize("number", [1, 2, 3, 7, 33])
    def test_as_many_groups_as_asked_for_share_the_tokens_evenly(self, lengths, packed, number):
        number = min(number, len(lengths))
        groups = even_groups(lengths, number, packed)
        assert len(groups) == number
        assert all(groups)
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
        if packed:  # no worse than the best by more than one row
            largest = max(tokens(lengths, group, packed) for group in groups)
            assert largest <= sum(lengths) / number + max(lengths)
        assert [max(lengths[row] for row in group) for group in groups] == sorted(
            (max(lengths[row] for row in group) for group in groups), reverse=True
        ), "the longest rows come first, so that memory runs out at once or not at all"

    @pytest.mark.parametrize("number", [1, 2, 3, 6])
    def test_equal_groups_have_equally_many_rows(self, lengths, packed, number):
        lengths = lengths * number
        groups = equal_groups(lengths, number, packed)
        assert [len(group) for group in groups] == [len(lengths) // number] * number
        assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))


@pytest.mark.parametrize("packed", [False, True])
def test_few_rows_are_grouped_as_the_best_of_all_ways(packed):
    for seed in range(30):
        lengths = random.Random(seed).choices(range(1, 30), k=6)
        ways = (
            [[row for row in range(6) if way[row] == group] for group in range(3)]
            for way in itertools.product(range(3), repeat=6)
        )
        best = min(max(tokens(lengths, group, packed) for group in way) for way in ways if all(way))
        found = max(tokens(lengths, group, packed) for group in even_groups(lengths, 3, packed))
        assert found <= (1.25 if packed else 1.0) * best, (lengths, found, best)


def test_padded_groups_share_lengths_and_packed_ones_sums():
    lengths = [1, 100, 2, 99, 3, 98]
    assert equal_groups(lengths, 3) == [[1, 3], [5, 4], [2, 0]]
    assert [sum(lengths[row] for row in group) for group in equal_groups(lengths, 3, packed=True)] == [101, 101, 101]


def test_memory_that_grows_with_the_width_of_a_row_counts():
    assert fewest_groups([8, 8, 2, 2], lambda tokens, width: tokens * width <= 64) == [[0], [1], [2, 3]]


@pytest.mark.parametrize("least", [0, 40, 1000])
def test_padded_groups_cost_no_more_than_any_other_way(least):
    def cost(lengths: list[int], way: list[list[int]]) -> float:
        return sum(max(tokens(lengths, group, False), least) for group in way)

    for seed in range(20):
        lengths = random.Random(seed).choices(range(1, 30), k=6)
        ways = ([[row for row in range(6) if way[row] == group] for group in set(way)] for way in TO_SIX)
        fitting = [way for way in ways if all(len(g) == 1 or tokens(lengths, g, False) <= 70 for g in way)]
        best = min((cost(lengths, way), len(way)) for way in fitting)
        found = cheapest_groups(lengths, lambda tokens, _: tokens <= 70, least)
        assert sorted(itertools.chain(*found)) == list(range(6))
        assert (cost(lengths, found), len(found)) == best
        assert all(len(group) == 1 or tokens(lengths, group, False) <= 70 for group in found)


@pytest.mark.parametrize("few", [False, True], ids=["resident", "streamed"])
def test_a_teacher_on_a_cpu_reads_few_tokens_of_padding(few):
    ratios = []
    for seed in range(20):
        lengths = [random.Random(seed * 100 + row).randint(10, 160) for row in range(16)]
        groups = frozen.pass_groups(tiny.qwen2(), lengths, torch.device("cpu"), passes_are_costly=few)
        ratios.append(sum(tokens(lengths, group, False) for group in groups) / sum(lengths))
    assert max(ratios) <= 1.15
    assert min(ratios) > 1, "all rows alone would be slower"


@pytest.mark.parametrize(("padded", "passes"), [(0, [[0], [1], [2]]), (64, [[0, 1, 2]])])
def test_split_teacher_that_cannot_pad_reads_each_row_alone(monkeypatch, padded, passes):
    """Processes run equally many passes, however long their rows are."""
    monkeypatch.setattr(frozen, "is_split_model", lambda _: True)
    policy = replace(PADDED, padded_up_to=padded)
    assert sorted(map(sorted, frozen.pass_groups(tiny.qwen2(), [9, 8, 9], torch.device("cpu"), policy))) == passes
