"""The same agents as TRL's GRPO has them, in two processes, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from environments.worlds import END, Adder, Drawn, Scripted, Told, call, flat, given, once, rows, tasks, words
from support import forks, tiny
from trl import GRPOConfig, GRPOTrainer


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
