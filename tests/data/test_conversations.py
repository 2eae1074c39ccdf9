"""A column `messages` is read as TRL's GKD trainer reads it: the student answers what precedes the last message."""

from __future__ import annotations

import pytest
from datasets import Dataset
from support import tiny
from trl.experimental.utils import DataCollatorForChatML

from trl_opsd import OPSDTrainer, RolloutBackend

CONVERSATIONS = [
    [
        *([{"role": "system", "content": "Be short."}] if number % 2 else []),
        *([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] if number % 3 else []),
        {"role": "user", "content": f"{number} + {number}?"},
        {"role": "assistant", "content": str(2 * number)},
    ]
    for number in range(8)
]


class Answers(RolloutBackend):
    """Writes one token, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def bind(self, trainer: OPSDTrainer) -> None:
        pass

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        self.asked += prompt_ids
        return [[5]] * len(prompt_ids)


def rows(kind: str = "map") -> Dataset:
    dataset = Dataset.from_dict({"messages": CONVERSATIONS, "topic": list(range(8))})
    return dataset if kind == "map" else dataset.to_iterable_dataset(num_shards=2)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_prompts_are_those_of_gkd(trained, kind):
    rollout = Answers()
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "shuffle_dataset": False}
    trainer = trained(train_dataset=rows(kind), rollout=rollout, **options)
    gkd = DataCollatorForChatML(tokenizer=tiny.tokenizer())([{"messages": one} for one in CONVERSATIONS])
    expected = [
        ids[mask.bool()].tolist() for ids, mask in zip(gkd["prompts"], gkd["prompt_attention_mask"], strict=True)
    ]
    assert rollout.asked == expected
    row = next(iter(trainer.train_dataset))
    assert row == {"topic": 0, "prompt": CONVERSATIONS[0][:-1], "completion": CONVERSATIONS[0][-1:]}


def test_conversations_of_every_dataset_are_split(make_trainer):
    rollout = Answers()
    trainer = make_trainer(eval_dataset={"one": rows(), "two": rows("stream")}, rollout=rollout)
    assert {f"eval_{name}_loss" for name in ("one", "two")} <= trainer.evaluate().keys()
    trainer.evaluate(rows())
    trainer.predict(rows("stream"))
    assert len(rollout.asked) == 4 * 8
    assert set(map(tuple, rollout.asked)) == {tuple(ids) for ids in rollout.asked[:8]}


def test_prompt_column_wins_over_messages(make_trainer):
    both = tiny.rows().add_column("messages", CONVERSATIONS)
    assert make_trainer(train_dataset=both).train_dataset["prompt"] == tiny.rows()["prompt"]
