"""Recorded episodes beside rows that act, with tools or in environments, and students that go on with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from datasets import Dataset
from environments.worlds import Adder, call, given, once
from support import tiny

from trl_opsd import HFRollout, Method, OPSDTrainer, before_turn
from trl_opsd.methods import OffPolicy
from trl_opsd.types.rollout import Author

CALLS = {"tools": ({"a": 2, "b": 2}, "4"), "environment": ({"number": 1}, "1")}
THOUGHT = "<think>\n\n</think>\n\n"
"""What Qwen3's template begins each turn with."""


class Saying(Adder):
    def get_feedback(self) -> str:
        return f"the total was {self.total}"


def episodes(kind: str, number: int = 8) -> Dataset:
    """What a student that acts does, in OpenAI's form."""
    arguments, answer = CALLS[kind]
    function = {"name": "add", "arguments": json.dumps(arguments)}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": answer},
        {"role": "assistant", "content": "done"},
    ]
    rows = [{"messages": [{"role": "user", "content": f"count {one}"}, *turns]} for one in range(number)]
    return Dataset.from_list(rows, on_mixed_types="use_json")


class Seen(Method):
    """Keeps the conversation of each row."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def generated(self, batch: Any) -> None:
        self.said += zip(batch.rows, batch.written.conversations, strict=True)


class Recording(OPSDTrainer):
    """Keeps the rows of each batch, and what the student and the teacher read of them."""

    def teach(self, rollout: Any, rows: Any) -> Any:
        inner, read = self.teaching.teachers.targets, []
        self.teaching.teachers.targets = lambda rollout, *rest: read.append(rollout) or inner(rollout, *rest)
        found = super().teach(rollout, rows)
        self.teaching.teachers.targets = inner
        self.taught = [*getattr(self, "taught", ()), (rows, rollout, *read)]
        return found


def acting(kind: str, **more: Any) -> dict[str, Any]:
    """A trainer of rows that act or are recorded, with the same words."""
    arguments, _ = CALLS[kind]
    script = once(THOUGHT + call(**arguments))
    made = given(
        lambda prompt: script(prompt).replace("done", THOUGHT + "done"), Saying if kind == "environment" else None
    )
    beside = {"tools": [tiny.add]} if kind == "tools" else {}
    options = {"lmbda": 0.5, "per_device_train_batch_size": 8, "train_dataset": episodes(kind), "max_steps": 2}
    return {"cls": Recording, **made, **beside, **options, **more}


@pytest.mark.parametrize("kind", CALLS)
def test_a_recorded_row_is_that_of_a_student_that_acts_and_only_this_one_acts(trained, kind):
    seen = Seen()
    trainer = trained(**acting(kind, eval_dataset=episodes(kind, 2), methods=[seen]))
    completions, counts = set(), dict.fromkeys(Author, 0)
    for rows, rollout, told in trainer.taught:
        authors = [
            ids[: len(one)] for ids, one in zip(rollout.authors.tolist(), rollout.completion_lists(), strict=True)
        ]
        for number, row in enumerate(rows):
            completions.add((tuple(rollout.completion_lists()[number]), tuple(map(bool, authors[number]))))
            assert {*authors[number]} == {Author.ENVIRONMENT, row.author}
            assert rollout.weights[number, : len(authors[number])].tolist() == [
                float(one > 0) for one in authors[number]
            ]
            counts[row.author] += 1
            is_told = "the total was" in trainer.processing_class.decode(told.prompt_lists()[number])
            assert is_told == (kind == "environment" and row.author == Author.STUDENT)
            assert (row.reward is not None) == is_told
    assert len(completions) == 1, "the same tokens by the same hand"
    assert 4 < counts[Author.STUDENT] < 12
    assert counts[Author.STUDENT] + counts[Author.DATASET] == 16
    assert sum(map(len, trainer.rollout.asked)) == 2 * counts[Author.STUDENT]
    assert tiny.logged(trainer, "turns/mean") == [2, 2]
    assert tiny.logged(trainer, "tools/call_frequency") == [1, 1]
    ((said, content),) = {(tuple(one["role"] for one in talk), talk[1]["content"]) for _, talk in seen.said}
    assert (said, content) == (("assistant", "tool", "assistant"), CALLS[kind][1])
    trainer.evaluate()
    rows, rollout, _ = trainer.taught[-1]
    assert {row.author for row in rows} == {Author.STUDENT}
    assert Author.DATASET not in rollout.authors


def test_weights_by_author_are_those_of_a_loop_over_tokens(trained):
    """In float64, one row at a time: the reverse KL of each token times the weight of its author, over their sum."""
    weights = {Author.STUDENT: 1.0, Author.DATASET: 0.5, Author.ENVIRONMENT: 0.1}
    method = OffPolicy(weights={one.word: weight for one, weight in weights.items()})
    options = {"divergence": "reverse_kl", "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e6, "max_steps": 1}
    start, teacher = (tiny.qwen2(*size, max_position_embeddings=4096).double() for size in ((32, 0), (48, 1)))
    trainer = trained(**acting("tools", methods=[method], **options))
    ((_, rollout, _),) = trainer.taught
    total = divisor = torch.zeros(())
    for prompt, ids, by in zip(
        rollout.prompt_lists(), rollout.completion_lists(), rollout.authors.tolist(), strict=True
    ):
        places = slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
        own, its = (one(torch.tensor([prompt + ids])).logits[0, places].log_softmax(-1) for one in (start, teacher))
        by_token = torch.tensor([weights[author] for author in by[: len(ids)]])
        total = total + (by_token * (own.exp() * (own - its.detach())).sum(-1)).sum()
        divisor = divisor + by_token.sum()
    loss = total / divisor
    loss.backward()
    assert tiny.logged(trainer, "loss") == pytest.approx([loss.item()], rel=1e-5)
    moved = torch.cat([(one - 0.1 * one.grad).detach().flatten() for one in start.parameters()])
    torch.testing.assert_close(tiny.weights(trainer).double(), moved, rtol=1e-5, atol=1e-6)
    log = trainer.state.log_history[0]
    for author in weights:
        counted = (rollout.authors == author) & (rollout.completion_mask != 0)
        assert log[f"tokens/{author.word}"] == counted.sum()


def test_a_resumed_run_of_both_equals_an_uninterrupted_one(trained, tmp_path):
    def run(**more: Any) -> tuple[list[Any], torch.Tensor]:
        options = {"rollout": HFRollout(), "max_completion_length": 120, "max_steps": 4, "learning_rate": 1e-2}
        trainer = trained(**acting("environment", **options, **more))
        return [one.completion_lists() for _, one, _ in trainer.taught], tiny.weights(trainer)

    completions, weights = run(save_strategy="steps", save_steps=2)
    again, resumed = run(resume=str(tmp_path / "checkpoint-2"))
    assert again == completions[2:]
    assert torch.equal(resumed, weights)


def test_a_student_goes_on_with_a_recorded_episode(trained):
    """As with its own: it answers what a tool said, whether it has called that in this run or not."""
    rows = Dataset.from_list([dict(episodes("tools", 1)[0])] * 8)
    cut = [before_turn(row, number, turn=number % 2, is_scored=True) for number, row in enumerate(rows)]
    assert [one["completion_prefix"] is None for one in cut] == [True, False] * 4
    data = Dataset.from_list(cut)
    trainer = trained(**acting("tools", train_dataset=data, eval_dataset=data, lmbda=1, max_steps=1))
    trainer.evaluate()
    assert [len(one) for one in trainer.rollout.asked] == [8, 4, 8, 4], "rows with a beginning have one turn"
    as_prompts = Dataset.from_list([before_turn(row, number, turn=number % 2) for number, row in enumerate(rows)])
    unscored = trained(**acting("tools", train_dataset=as_prompts, lmbda=1, max_steps=1))
    assert sorted(unscored.rollout.asked[0]) == sorted(trainer.rollout.asked[0]), "the student reads the same"
    (_, rollout, _), (_, evaluated, _) = trainer.taught
    for one in (rollout, evaluated):
        (ids,) = {*map(tuple, one.completion_lists())}
        assert len({*map(tuple, one.prompt_lists())}) == 1
        plain, begun = sorted({tuple(by[: len(ids)]) for by in one.authors.tolist()})
        called, answered = plain.index(Author.ENVIRONMENT), len(ids) - plain[::-1].index(Author.ENVIRONMENT)
        assert plain == (1,) * called + (0,) * (answered - called) + (1,) * (len(ids) - answered)
        assert begun == (3,) * called + plain[called:]
        assert torch.equal(one.weights, (one.authors > 0) * one.completion_mask.float())
