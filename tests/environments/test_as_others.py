"""The same agents as tools, as TRL's GRPO has them, in two processes, resumed, with LoRA and with other teachers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.worlds import END, Adder, Drawn, Scripted, Told, call, figures, flat, given, once, rows, tasks, words
from support import forks, tiny
from trl import GRPOConfig, GRPOTrainer

EXAMPLES, DOCS = (Path(__file__).parents[2] / name for name in ("examples", "docs"))


@pytest.fixture
def doors(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from doors import DOORS, world

    yield DOORS, world
    for name in [name for name in sys.modules if name.partition(".")[0] == "doors"]:
        del sys.modules[name]


def test_doors_as_an_environment_are_doors_as_a_tool(trained, doors):
    models, world = doors
    dataset = world.rows(24)
    told = [f"{maze.question}\n\n{maze.hint}" for maze in world.draw(24)]
    same = {
        "model": str(models / "student"),
        "teacher_model": str(models / "teacher"),
        "processing_class": None,
        "rollout": None,
        "max_completion_length": world.MOST_TOKENS,
        "max_tool_calling_iterations": 8,
        "per_device_train_batch_size": 8,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
    }
    logs, students = [], []
    for acting in (
        {
            "train_dataset": dataset.add_column("teacher_prompt", [[{"role": "user", "content": one}] for one in told]),
            "tools": [world.try_door],
        },
        {"train_dataset": dataset, "environment_factory": world.Doors},
    ):
        trainer = trained(**same, **acting)
        logs.append([log for log in trainer.state.log_history if "loss" in log])
        students.append(list(trainer.model.parameters()))
    for name in ("loss", "tools/call_frequency", "completions/mean_length", "turns/mean", "num_tokens"):
        assert [log[name] for log in logs[0]] == [log[name] for log in logs[1]], name
    assert logs[0][0]["tools/call_frequency"] > 1
    assert all(map(torch.equal, *students))


class Fixed(GRPOTrainer):
    """TRL's GRPO, whose completions follow a script."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return self.script.complete(prompt_ids, 0), None


def grpo(folder: Path, environment: Any, turns: Any, dataset: Any) -> Fixed:
    trainer = Fixed(
        model=tiny.qwen2(max_position_embeddings=4096),
        args=GRPOConfig(
            str(folder / "grpo"),
            max_completion_length=600,
            per_device_train_batch_size=4,
            num_generations=2,
            generation_batch_size=4,
            report_to="none",
            bf16=False,
        ),
        train_dataset=dataset,
        processing_class=words(),
        environment_factory=environment,
    )
    trainer.script = Scripted(turns)
    trainer.script.bind(trainer)
    return trainer


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_ids_and_masks_are_those_of_trls_grpo(make_trainer, tmp_path):
    turns = lambda prompt: [call(number=2), call("misbehave", how="raise"), f"two{END}"][  # noqa: E731
        prompt.count("<tool_response>")
    ]
    dataset = rows(4, start=[1, 2, 3, 4])
    theirs = grpo(tmp_path, Adder, turns, dataset)
    their_rows = [dict(row) for row in dataset]
    batch = theirs._generate_and_score_completions(their_rows)
    ours = make_trainer(**given(turns, train_dataset=dataset))
    rollout = ours.score([dict(row) for row in dataset]).rollout
    assert ours.rollout.asked == theirs.script.asked
    pairs = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
    assert rollout.completion_lists() == [ids[real].tolist() for ids, real in pairs]
    learned = (batch["completion_mask"] * batch["tool_mask"]).float()
    assert torch.equal(rollout.weights, learned)
    assert rollout.prompt_lists() == [
        ids[of.bool()].tolist() for ids, of in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    written = call(number=2), call("misbehave", how="raise"), f"two{END}"
    assert learned.sum() == 4 * sum(len(words()(text)["input_ids"]) for text in written)


@pytest.mark.long
@pytest.mark.distributed
def test_two_processes_act_out_the_tasks_of_one(tmp_path):
    two = forks.results("ddp", tasks, tmp_path / "two", 2, 4)[0]
    odd = forks.results("ddp", tasks, tmp_path / "odd", 8, 4)[0]
    one = tasks(tmp_path / "one")
    assert two["train"] == one["train"]
    assert flat(two["eval"])[: 2 * 6] == flat(one["eval"])
    assert [len(set(batch)) for batch in odd["train"]] == [1] * 3, "a group in both has one task"


@pytest.mark.long
@pytest.mark.distributed
def test_metrics_are_those_of_all_rows(tmp_path):
    """Of five rows, with a row that only fills the last batch."""
    two = forks.results("ddp", figures, tmp_path / "two", 2, 2)[0]
    one, ones = (figures(tmp_path / f"one{size}", 1, size) for size in (4, 1))
    assert one.keys() == two.keys() == ones.keys()
    assert two == pytest.approx(one, rel=1e-4, abs=1e-6)
    assert ones == pytest.approx(one, rel=1e-4, abs=1e-6)
    turns = [1 + row % 3 for row in range(5)]
    assert (one["turns/mean"], one["eval_turns/mean"]) == pytest.approx((sum(turns[:4]) / 4, sum(turns) / 5))
    assert one["eval_tools/call_frequency"] == pytest.approx(4 / 5)
    assert one["eval_tools/failure_frequency"] == pytest.approx(3 / 4)
    assert one["eval_start"] == 2
    assert one["eval_completions/clipped_ratio"] == pytest.approx(1 / 5)
    assert 0 < one["eval_gate/mean"] < 1
    assert one["eval_completions/min_length"] < one["eval_completions/mean_length"] - 1


class DrawnAndTold(Drawn, Told):
    """The weights after a training tell its tasks."""


def test_resumed_weights_are_those_of_an_uninterrupted_run(make_trainer, tmp_path):
    def trainer(folder: str, steps: int) -> Any:
        return make_trainer(
            **given(once(call(number=1)), DrawnAndTold, train_dataset=rows(8), max_steps=steps),
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=2,
            learning_rate=1e-3,
        )

    whole = trainer("whole", 4)
    whole.train()
    resumed = trainer("parts", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(tiny.weights(whole), tiny.weights(resumed))
