"""What flows through a step is frozen, cut and packed without a loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from trl_opsd.types import Rollout, RowTargets, TeacherTargets

pytestmark = pytest.mark.quick


def batch(rows: int = 5) -> dict[str, torch.Tensor]:
    return {
        "prompt_ids": torch.arange(rows * 3).view(rows, 3),
        "prompt_mask": torch.ones(rows, 3),
        "completion_ids": torch.arange(rows * 2).view(rows, 2),
        "completion_mask": torch.ones(rows, 2),
    }


def test_a_rollout_is_frozen():
    rollout = Rollout.unpack(batch())
    with pytest.raises(dataclasses.FrozenInstanceError):
        rollout.prompt_ids = rollout.completion_ids


def test_tool_tokens_are_read_but_not_trained_on():
    rollout = Rollout.unpack({**batch(2), "tool_mask": torch.tensor([[1, 0], [1, 1]])})
    assert rollout.completion_mask.sum() == 4
    assert rollout.weights.tolist() == [[1, 0], [1, 1]]
    assert rollout.tool_mask.tolist() == [[1, 0], [1, 1]]
    narrow = dataclasses.replace(rollout, completion_mask=torch.tensor([[1, 0], [1, 0]])).cut()
    assert narrow.tool_mask.tolist() == [[1], [1]]


def test_selected_rows_are_those_of_the_rollout():
    rollout = dataclasses.replace(Rollout.unpack(batch(5)), extras={"images": ["a"]})
    parts = [rollout.select(rows) for rows in ([0, 1], [2, 3], [4])]
    assert all(part.extras is rollout.extras for part in parts)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "weights"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(rollout, name))
    assert sum((part.measured() for part in parts), ()) == rollout.measured()


def test_targets_survive_pack_and_unpack():
    rows = [RowTargets(torch.rand(len(places), 4), torch.tensor(places)) for places in ([0, 2], [1])]
    targets = TeacherTargets.by_row(rows, tokens=3, teacher=torch.tensor([1, 0]))
    again = TeacherTargets.unpack({**targets.pack(), "completion_ids": torch.ones(2, 3)})
    assert (again.rows, again.tokens, again.teacher) == (targets.rows, 3, targets.teacher)
    expected = torch.zeros(2, 3, 4)
    expected[0, [0, 2]], expected[1, [1]] = rows[0].hidden, rows[1].hidden
    assert torch.equal(again.hidden, expected)
