"""The comparison of ways to train agents: its models and methods are what it says."""

from __future__ import annotations

import compare_agents
import pytest
from agents import TASKS
from compare_agents import METHODS, Curve, Judge, Method, build, environment
from doors import DOORS
from transformers import AutoModelForCausalLM

from trl_opsd import OPSDTrainer

TASK = TASKS["doors"]


def measured(name, folder, is_told):
    return Judge(TASK, DOORS, folder, 40, is_told).measure(AutoModelForCausalLM.from_pretrained(DOORS / name))


def test_teacher_escapes_and_student_rarely_does(tmp_path):
    teacher, student = measured("teacher", tmp_path, True), measured("student", tmp_path, False)
    assert min(teacher.values()) >= 0.95
    assert student["sampled/1"] < 0.8
    assert student["sampled/2"] < 0.5
    assert max(student[f"{how}/{rooms}"] for how in ("sampled", "greedy") for rooms in (3, 4)) < 0.35


@pytest.mark.long
def test_guide_escapes_every_maze(tmp_path):
    told = measured("guide", tmp_path, True)
    assert min(told.values()) >= 0.95


def test_each_method_tells_whom_it_says():
    row, told = {"maze": "0042", "rooms": 2}, {}
    for name, method in {
        "before": Method(),
        "after": Method(tells_afterwards=True),
        "both": Method(is_told=True),
    }.items():
        world = environment(TASK, method)()
        told[name] = world.reset(**row), world.get_privileged_context(), world.get_feedback()
    assert told == {
        "before": ("", "doors 1 1", None),
        "after": ("", None, "doors 1 1"),
        "both": ("\n\ndoors 1 1", None, None),
    }


class Walks(OPSDTrainer):
    """Keeps the completions that are taught."""

    walks: list[str]

    def teach(self, rollout, rows):
        self.walks = self.processing_class.batch_decode(rollout.completion_lists())
        return super().teach(rollout, rows)


@pytest.mark.parametrize("name", ["on-policy, forward KL", "off-policy, forward KL"])
def test_only_on_policy_walks_have_closed_doors(name, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_agents, "OPSDTrainer", Walks)
    rows = TASK.world.rows(64)
    curve = Curve(lambda *_: {}, {"tokens": 1, "seconds": 1e-9}, points=1)
    trainer = build(TASK, METHODS[name], DOORS, rows, curve, seed=0, rate=1e-4, folder=tmp_path)
    trainer.train()
    assert [point["step"] for point in curve.points] == [0, 1]
    closed = [walk for walk in trainer.walks if "closed" in walk]
    assert len(trainer.walks) == 32
    assert len(closed) > 8 if METHODS[name].is_on_policy else not closed
    if not METHODS[name].is_on_policy:
        assert all(walk.endswith("<|assistant|>out<|end|>") for walk in trainer.walks)
