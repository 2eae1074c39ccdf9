"""The same agents as tools, as TRL's GRPO has them, in two processes, resumed, with LoRA and with other teachers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from environments.worlds import END, Adder, Scripted, Told, call, given, once, rows, words
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from trl_opsd.types import Rollout

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def doors(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from doors import DOORS, world

    yield DOORS, world
    for name in [name for name in sys.modules if name.partition(".")[0] == "doors"]:
        del sys.modules[name]


def test_doors_as_an_environment_are_doors_as_a_tool(make_trainer, doors):
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
        trainer = make_trainer(**same, **acting)
        trainer.train()
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


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_ids_and_masks_are_those_of_trls_grpo(make_trainer, tmp_path):
    turns = lambda prompt: [call(number=2), call("misbehave", how="raise"), f"two{END}"][  # noqa: E731
        prompt.count("<tool_response>")
    ]
    dataset = rows(4, start=[1, 2, 3, 4])
    theirs = Fixed(
        model=tiny.qwen2(max_position_embeddings=4096),
        args=GRPOConfig(
            str(tmp_path / "grpo"),
            max_completion_length=600,
            per_device_train_batch_size=4,
            num_generations=2,
            generation_batch_size=4,
            report_to="none",
            bf16=False,
        ),
        train_dataset=dataset,
        processing_class=words(),
        environment_factory=Adder,
    )
    theirs.script = Scripted(turns)
    theirs.script.bind(theirs)
    their_rows = [dict(row) for row in dataset]
    batch = theirs._generate_and_score_completions(their_rows)
    ours = make_trainer(**given(turns, train_dataset=dataset))
    rollout = Rollout.unpack(ours._generate_and_score_completions([dict(row) for row in dataset]))
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


@pytest.mark.parametrize("kind", ["base", "live", "ema"])
def test_a_student_may_teach_itself_with_an_adapter_or_without(make_trainer, kind):
    trainer = make_trainer(
        **given(once(call(number=1)), Told, teacher_model=None, max_steps=2),
        teacher_model_kind=kind,
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
        logging_steps=1,
        learning_rate=1e-2,
    )
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[0] > 0
    assert losses[0] != losses[1]


def test_resumed_weights_are_those_of_an_uninterrupted_run(make_trainer, tmp_path):
    def trainer(folder: str, steps: int) -> Any:
        return make_trainer(
            **given(once(call(number=1)), Told, train_dataset=rows(8, start=list(range(8))), max_steps=steps),
            output_dir=str(tmp_path / folder),
            save_strategy="steps",
            save_steps=2,
            learning_rate=1e-3,
        )

    whole = trainer("whole", 4)
    whole.train()
    resumed = trainer("parts", 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("of", ["itself", "a base", "the base of a dataclass"])
def test_a_run_does_not_resume_with_other_methods(make_trainer, tmp_path, of):
    class Other(Told):
        def add(self, number: int) -> str:
            """Adds a number.

            Args:
                number: The number to add.

            Returns:
                The total.
            """
            return str(-number)

    first, then = Told, Other
    if of != "itself":
        first, then = (type("Told", (kind,), {}) for kind in (first, then))
    if of == "the base of a dataclass":
        first, then = (dataclass(init=False)(kind) for kind in (first, then))
    options = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 1}
    make_trainer(**given(once(call(number=1)), first), **options).train()
    with pytest.raises(ValueError, match="environment Told"):
        make_trainer(**given(once(call(number=1)), then, max_steps=2), **options).train(
            resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1")
        )


def test_several_teachers_read_what_the_environment_tells(make_trainer):
    teachers = {name: tiny.qwen2(48, seed=seed, max_position_embeddings=4096) for name, seed in (("a", 1), ("b", 2))}
    trainer = make_trainer(
        **given(
            once(call(number=1)),
            Told,
            teacher_model=teachers,
            train_dataset=rows(4, start=[1, 2, 3, 4], teacher=["a", "b"] * 2),
        )
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["divergence/teacher/a"] > 0
    assert log["divergence/teacher/b"] > 0
