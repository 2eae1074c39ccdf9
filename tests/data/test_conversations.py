"""A column `messages` is read as TRL's GKD trainer reads it: the student answers what precedes the last message."""

from __future__ import annotations

import pytest
from datasets import Dataset
from support import tiny
from support.rollouts import Answering
from trl.experimental.utils import DataCollatorForChatML

CONVERSATIONS = [
    [
        *([{"role": "system", "content": "Be short."}] if number % 2 else []),
        *([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}] if number % 3 else []),
        {"role": "user", "content": f"{number} + {number}?"},
        {"role": "assistant", "content": str(2 * number)},
    ]
    for number in range(8)
]


def rows(kind: str = "map") -> Dataset:
    dataset = Dataset.from_dict({"messages": CONVERSATIONS, "topic": list(range(8))})
    return dataset if kind == "map" else dataset.to_iterable_dataset(num_shards=2)


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_prompts_are_those_of_gkd(trained, kind):
    asked, options = [], {"per_device_train_batch_size": 4, "max_steps": 2, "shuffle_dataset": False}
    trainer = trained(train_dataset=rows(kind), rollout=Answering(lambda ids: asked.append(ids) or [5]), **options)
    gkd = DataCollatorForChatML(tokenizer=tiny.tokenizer())([{"messages": one} for one in CONVERSATIONS])
    expected = zip(gkd["prompts"], gkd["prompt_attention_mask"], strict=True)
    assert asked == [ids[mask.bool()].tolist() for ids, mask in expected]
    row = next(iter(trainer.train_dataset))
    assert row == {"topic": 0, "prompt": CONVERSATIONS[0][:-1], "completion": CONVERSATIONS[0][-1:]}


def test_conversations_of_every_dataset_are_split(make_trainer):
    asked, given = [], {"one": rows(), "two": rows("stream")}
    trainer = make_trainer(eval_dataset=given, rollout=Answering(lambda ids: asked.append(tuple(ids)) or [5]))
    assert {f"eval_{name}_loss" for name in given} <= trainer.evaluate().keys()
    trainer.evaluate(rows())
    trainer.predict(rows("stream"))
    assert len(asked) == 4 * 8
    assert {*asked} == {*asked[:8]}


def test_prompt_column_wins_over_messages(make_trainer):
    both = tiny.rows().add_column("messages", CONVERSATIONS)
    assert make_trainer(train_dataset=both).train_dataset["prompt"] == tiny.rows()["prompt"]
