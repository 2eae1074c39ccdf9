"""Small values and tools that everything else uses."""

from __future__ import annotations

import dataclasses
import random
import re
import time

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from lone_host import LoneHost

from trl_opsd.data.completions import cut_after_end
from trl_opsd.data.readers import PromptLimits
from trl_opsd.host import Host
from trl_opsd.loop.step_stats import PhaseClock
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.rollout import FixedRollout
from trl_opsd.types import Rollout, RowTargets, TeacherTargets


def batch(rows: int = 5) -> dict[str, torch.Tensor]:
    return {
        "prompt_ids": torch.arange(rows * 3).view(rows, 3),
        "prompt_mask": torch.ones(rows, 3),
        "completion_ids": torch.arange(rows * 2).view(rows, 2),
        "completion_mask": torch.ones(rows, 2),
    }


def test_the_trainer_implements_host_and_the_lone_host_nothing_else(make_trainer):
    asked = {*Host.__annotations__, *(name for name in vars(Host) if not name.startswith("_"))}
    stand_in = LoneHost(tiny.qwen2(), PromptLimits(vocabulary=tiny.VOCABULARY, context=None, completion=8))
    assert {name for name in dir(stand_in) if not name.startswith("_")} == asked
    trainer = make_trainer()
    assert [name for name in asked if not hasattr(trainer, name)] == []


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


@pytest.mark.parametrize(
    ("written", "kept"), [([5, 6], [5, 6]), ([5, 2, 6], [5, 2]), ([5, 3, 2], [5, 3]), ([2], [2]), ([], [])]
)
def test_a_completion_is_cut_after_its_first_end_token(written, kept):
    assert cut_after_end(written, {2, 3}) == kept


def test_an_unrecorded_prompt_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"for 1 of 2 prompts, the first with token ids \[9\]"):
        FixedRollout({(1,): [2]}).complete([[1], [9]], step=0)


def test_the_time_of_a_phase_excludes_nested_phases():
    clock = PhaseClock()
    with clock("outer"):
        time.sleep(0.01)
        with clock("inner"):
            time.sleep(0.05)
    assert clock.seconds["inner"] >= 0.05
    assert 0.01 <= clock.seconds["outer"] < 0.05


def test_a_phase_is_timed_by_the_clock_that_is_given():
    clock = PhaseClock(now=iter([1.0, 2.0, 5.0, 11.0]).__next__)
    with clock("outer"), clock("inner"):
        pass
    assert clock.seconds == {"outer": 7.0, "inner": 3.0}


def test_queued_work_counts_for_the_phase_that_queued_it(monkeypatch):
    queued = [0.0]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: time.sleep(queued.pop() if queued else 0))
    clock = PhaseClock()
    with clock("compare"):
        queued.append(0.05)
        with clock("complete"):
            pass
    assert clock.seconds["compare"] >= 0.05
    assert clock.seconds["complete"] < 0.05


def test_a_failed_phase_is_timed_and_closed():
    clock = PhaseClock()
    with pytest.raises(RuntimeError), clock("outer"), clock("inner"):
        raise RuntimeError
    with clock("next"):
        time.sleep(0.01)
    assert set(clock.seconds) == {"outer", "inner", "next"}
    assert clock.seconds["outer"] < 0.01


def test_random_states_are_restored_after_an_exception():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def draw_and_fail():
        with preserved_rng(torch.device("cpu")):
            torch.rand(3), random.random(), np.random.rand()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        draw_and_fail()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


@pytest.mark.refusal
@pytest.mark.parametrize(
    "conversation",
    [
        [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}],
        [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}],
    ],
)
def test_advice_for_conversations_makes_prompts(make_trainer, conversation):
    dataset = Dataset.from_list([{"conversations": conversation}] * 8)

    def advised(message: str, code: str) -> str:
        with pytest.raises(ValueError, match=message) as raised:
            make_trainer(train_dataset=dataset)
        return re.search(rf"`({code})`", str(raised.value))[1]

    dataset = eval(advised("has no column 'prompt'", r"dataset\.rename_column.*"), {"dataset": dataset})
    if "from" in conversation[0]:
        converted = advised("a dict with", r"\[.*\]")
        dataset = dataset.map(lambda row: {"prompt": eval(converted, {"row": row})})
    shortened = advised("ends with a message of the assistant", "prompt = .*?").replace("prompt = ", "")
    made = dataset.map(lambda row: {"prompt": eval(shortened, {"messages": row["prompt"]})})
    assert make_trainer(train_dataset=made).train_dataset[0]["prompt"] == [{"role": "user", "content": "2+2="}]
