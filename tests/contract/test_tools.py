"""A student that calls tools is trained on its own tokens and not on the tools' answers, as in TRL."""

from __future__ import annotations

import math

from support import tiny
from support.tool_calls import CALL, CallsOnce, words


def test_tool_answers_are_completed_but_not_in_the_loss(make_trainer):
    tokenizer = words()
    dataset = tiny.rows(4).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make_trainer(
        model=tiny.qwen2(max_position_embeddings=4096),
        teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=4096),
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout=CallsOnce(),
        tools=[tiny.add],
        max_completion_length=400,
        max_steps=2,
    )
    rollout = trainer.score([dataset[0], dataset[1]]).rollout
    text = tokenizer.decode(rollout.completion_ids[0])
    assert "<tool_response>\n4\n</tool_response>" in text
    trained_on = tokenizer.decode(rollout.completion_ids[0][rollout.weights[0] == 1])
    assert trained_on == CALL + "four<|im_end|>"

    trainer.train()
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] == 1.0
    assert log["tools/failure_frequency"] == 0.0
    assert 0 < log["loss"] < math.inf


def test_rewards_see_calls_and_their_answers(make_trainer):
    seen = []

    def see(completions, completion_ids, **_):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [0.0] * len(completions)

    tokenizer = words()
    trainer = make_trainer(
        model=tiny.qwen2(max_position_embeddings=4096),
        teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=4096),
        train_dataset=None,
        eval_dataset=tiny.rows(2).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=tokenizer,
        rollout=CallsOnce(),
        reward_funcs=see,
        tools=[tiny.add],
        max_completion_length=400,
    )
    trainer.evaluate()
    assert len(seen) == 2
    for messages, ids in seen:
        assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
        assert messages[1]["content"] == "4"
        assert messages[2]["content"] == "four"
        assert "<tool_response>\n4\n</tool_response>" in tokenizer.decode(ids)
