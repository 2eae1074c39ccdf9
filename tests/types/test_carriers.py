"""What flows through a step is frozen, and cut and divided without a loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trl_opsd.types import OnHost, Rollout, RowTargets, TeacherTargets

pytestmark = pytest.mark.quick


def made(rows: int = 5) -> Rollout:
    return Rollout(
        prompt_ids=torch.arange(rows * 3).view(rows, 3),
        prompt_mask=torch.ones(rows, 3),
        completion_ids=torch.arange(rows * 2).view(rows, 2),
        completion_mask=torch.ones(rows, 2),
        weights=torch.ones(rows, 2),
    )


def test_a_rollout_is_frozen():
    rollout = made()
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.prompt_ids = rollout.completion_ids


def test_a_weight_that_is_written_is_read_anew():
    rollout = made(2)
    rollout = dataclasses.replace(rollout, on_host=OnHost.known(rollout.weights, rollout.weights.clone()))
    assert rollout.weights_on_host() is rollout.on_host.copy
    rollout.weights[0, 0] = 0
    assert rollout.weights_on_host()[0, 0] == 0


def test_cut_rows_know_what_tools_wrote():
    mask = torch.tensor([[1, 0], [1, 0]])
    narrow = dataclasses.replace(made(2), authors=torch.tensor([[1, 0], [1, 1]]), completion_mask=mask).cut()
    assert narrow.authors.tolist() == [[1], [1]]


def test_selected_rows_are_those_of_the_rollout():
    rollout = made()
    parts = [rollout.select(rows) for rows in ([0, 1], [2, 3], [4])]
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "weights"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(rollout, name))
    assert sum((part.measured() for part in parts), ()) == rollout.measured()


def test_selected_targets_are_those_of_the_rows():
    rows = [RowTargets(torch.rand(len(places), 4), torch.tensor(places)) for places in ([0, 2], [1])]
    targets = TeacherTargets.by_row(rows, 3, torch.tensor([1, 0]), {"contrast": (rows[1], rows[0])})
    assert targets.select([0, 1]).teacher.tolist() == [1, 0]
    other = targets.select([1])
    assert (other.rows, other.tokens, other.teacher.tolist()) == ((rows[1],), 3, [0])
    assert other.reference_states == {"contrast": (rows[0],)}
    among = targets.among([2, 0], 3)
    assert (among.rows[2], among.rows[0], len(among.rows[1].places)) == (rows[0], rows[1], 0)
    assert among.teacher.tolist() == [0, 1, 1], "of a row that was not read any"
    expected = torch.zeros(2, 3, 4)
    expected[0, [0, 2]], expected[1, [1]] = rows[0].hidden, rows[1].hidden
    assert [row.places.tolist() for row in targets.cut(2).rows] == [[0], [1]]
    assert torch.equal(targets.hidden, expected)
