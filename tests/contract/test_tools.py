"""A student that calls tools is trained on its own tokens and not on the tools' answers, as in TRL."""

from __future__ import annotations

import math

from support import tiny
from support.tool_calls import CALL, CallsOnce, words


def test_tool_answers_are_completed_and_rewarded_but_not_in_the_loss(make_trainer):
    seen = []

    def see(completions, completion_ids, **_):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [0.0] * len(completions)

    tokenizer = words()
    trainer = make_trainer(
        model=tiny.qwen2(max_position_embeddings=4096),
        teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=4096),
        train_dataset=tiny.rows(4).map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}),
        processing_class=tokenizer,
        rollout=CallsOnce(),
        reward_funcs=see,
        tools=[tiny.add],
        max_completion_length=400,
        max_steps=2,
    )
    rollout = trainer.score(trainer.train_dataset.to_list()[:2]).rollout
    assert "<tool_response>\n4\n</tool_response>" in tokenizer.decode(rollout.completion_ids[0])
    trained_on = tokenizer.decode(rollout.completion_ids[0][rollout.weights[0] == 1])
    assert trained_on == CALL + "four<|im_end|>"

    seen.clear()
    trainer.train()
    assert len(seen) == 4
    for messages, ids in seen:
        said = [(message["role"], message.get("content")) for message in messages]
        assert said[1:] == [("tool", "4"), ("assistant", "four")]
        assert said[0][0] == "assistant"
        assert "<tool_response>\n4\n</tool_response>" in tokenizer.decode(ids)
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.0)
    assert 0 < log["loss"] < math.inf
