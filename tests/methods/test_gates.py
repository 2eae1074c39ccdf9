"""Rewards decide which rows count, and what the teacher reads; controls take the teacher's part away."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from controls import Shuffled, Unprivileged
from support import tiny
from support.rollouts import Numbered
from tokenizers import AddedToken

from trl_opsd import OPSDTrainer
from trl_opsd.methods.rows import Outcome, texts_of

WORDS = tiny.tokenizer()
HINTED = tiny.rows().add_column("privileged_context", [f"hint {row}" for row in range(8)])
REWARDS = [1 / 3, 1.0, 5 / 3, 2 / 3]
"""Of the completions of each prompt."""


def numbered(prompt: str, which: int) -> str:
    """The number of a completion within its prompt, and characters, as many as its reward has thirds."""
    return f"{which}{'x' * round(3 * REWARDS[which] - 1)}"


def thirds(completions: list[str], **_: Any) -> list[float]:
    return [len(one) / 3 for one in completions]


class Keeping(OPSDTrainer):
    """Keeps the gates of all rows, and whether they weigh."""

    def __init__(self, *args: Any, **given: Any) -> None:
        self.gates: list[float] = []
        self.weighs: list[bool] = []
        super().__init__(*args, **given)

    def teach(self, rollout, rows):
        found = super().teach(rollout, rows)
        self.gates += [row.gate for row in rows]
        return found

    def compare(self, student, rollout, targets, num_items):
        self.weighs += rollout.weights.any(1).tolist()
        return super().compare(student, rollout, targets, num_items)


@pytest.fixture
def trained(trained):
    options = {
        "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 1, "shuffle_dataset": False,
        "optim": "sgd", "divergence": "forward_kl", "learning_rate": 1e-2, "max_grad_norm": 1e9,
        "reward_funcs": thirds, "train_dataset": tiny.rows(),
    }  # fmt: skip
    return lambda cls=Keeping, **given: trained(cls, **{"rollout": Numbered(numbered), **options, **given})


ADVANTAGES = (torch.tensor(REWARDS) - torch.tensor(REWARDS).mean()) / (torch.tensor(REWARDS).std() + 1e-4)
GATES = {1.0: [0, 1, 1, 0], "reward": REWARDS, "advantage": ADVANTAGES.clamp(min=0).tolist(), -1: [1] * 4}


@pytest.mark.parametrize("gate", GATES)
def test_rows_count_by_their_reward(trained, gate):
    gated = trained(reward_gate=gate)
    assert gated.gates == pytest.approx(GATES[gate] * 2)
    assert tiny.logged(gated, "gate/mean") == [pytest.approx(sum(GATES[gate]) / 4)]


def test_a_gate_applies_in_training_only(trained):
    gated = trained(reward_gate=99.0, eval_dataset=tiny.rows(4))
    found = gated.evaluate()
    assert gated.gates[:8] == [0.0] * 8
    assert found["eval_divergence/mean"] > 0


def test_a_step_in_which_no_row_counts_changes_nothing(trained):
    gated = trained(reward_gate=99.0, optim="adamw_torch", weight_decay=0.1)
    assert tiny.logged(gated, "gate/mean") == [0.0]
    assert not tiny.logged(gated, "loss") + tiny.logged(gated, "grad_norm")
    assert all(map(torch.equal, gated.model.parameters(), tiny.qwen2(32, seed=0).parameters()))


def test_an_evaluation_without_success_has_no_loss(trained):
    trainer = trained(teacher_context="group_success", success_threshold=9.5, eval_dataset=tiny.rows(4))
    found = trainer.evaluate()
    assert found["eval_gate/mean"] == 0
    assert math.isnan(found["eval_loss"])


def test_a_row_without_a_reward_does_not_pass_a_gate(trained):
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None if one.startswith("2") else 5.0 for one in completions]

    assert trained(reward_gate=1.0, reward_funcs=some).gates == [1, 1, 0, 1] * 2


def test_teacher_reads_another_success_or_the_row_is_masked(trained):
    class Reading(Keeping):
        def teach(self, rollout, rows):
            self.outcomes = [row.outcome for row in rows]
            found = super().teach(rollout, rows)
            for row in rows:
                row.gate = 1.0  # it is asked again below
            self.read = [one.value for one in self.teaching.prompts.own(rows, rollout.completion_lists())]
            return found

    given = {"teacher_context": "group_success", "success_threshold": 1.5}
    template = {"teacher_prompt_template": "{prompt}<{privileged_context}>", "train_dataset": HINTED}
    alone, told = trained(Reading, **given), trained(Reading, **given, **template)
    texts = ("0", "1xx", "2xxxx", "3x")
    group = tuple(zip(texts, map(pytest.approx, REWARDS), strict=True))
    for place, (prompt, number) in enumerate(product(tiny.PROMPTS[:2], range(4))):
        assert alone.outcomes[place] == Outcome(pytest.approx(REWARDS[number]), number, group)
        solution = f"{prompt}\n\nA correct solution:\n\n2xxxx\n\nNow solve it yourself."
        assert alone.read[place] == (prompt if number == 2 else solution)
        assert told.read[place] == f"{prompt}<{f'hint {place // 4}' if number == 2 else '2xxxx'}>"
    assert sorted(alone.weighs) == sorted([True, True, False, True] * 2)
    assert [tiny.logged(one, "gate/mean") for one in (alone, told)] == [[0.75], [1]]


def test_groups_of_an_evaluation_are_its_own(trained):
    class Reading(Keeping):
        def teach(self, rollout, rows):
            self.groups = [len(row.outcome.group) for row in rows]
            return super().teach(rollout, rows)

    given = {"teacher_context": "group_success", "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    found = trained(Reading, eval_dataset=tiny.rows(2), **given)
    assert found.groups == [4] * 8
    found.evaluate()
    assert found.groups == [2] * 4


def test_a_solution_that_does_not_fit_is_not_shown(trained):
    given = {
        "teacher_context": "group_success",
        "success_threshold": 1.5,
        "teacher_prompt_template": "{prompt}{privileged_context}" + "x" * 60,
    }
    found = trained(teacher_model=tiny.qwen2(48, seed=1, max_position_embeddings=64), **given)
    assert found.gates == [0.0] * 8
    assert tiny.logged(found, "gate/mean") == [0.0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plan</think>4", "4"),  # R1's and QwQ's templates begin the thought in the prompt
        ("one</think>two</think>4", "4"),
        ("so <think>a</think>far <think>b</think>4", "so far 4"),
        ("a</think>4<think>or 5", "4"),
        ("<think>without end", None),
        ("[THINK]a plan[/THINK]4", "4"),
        ("<|channel|>analysis<|message|>a plan<|end|><|start|>assistant<|channel|>final<|message|>4", "4"),
        ("<|channel>thought\na plan<channel|>4", "4"),
        ("4", "4"),
    ],
)
def test_only_what_follows_a_thought_is_shown(text, shown):
    assert Outcome(0.0, 0, (("", 0.0), (text, 1.0))).success(1.0) == shown


@pytest.mark.parametrize("marks", [["[THINK]", "[/THINK]"], []])
def test_marks_of_thoughts_are_kept_where_they_are_special_tokens(marks):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken(one, special=True) for one in marks])
    (text,) = texts_of(tokenizer, tokenizer(["".join(["[THINK]", "so", "[/THINK]", "4<|im_end|>"])])["input_ids"])
    assert text.replace(" ", "") == "[THINK]so[/THINK]4"


# ---- Controls --------------------------------------------------------------------------------------------------------


def test_an_evaluation_has_the_teacher_that_a_control_replaces(trained):
    """Also of a single row, which cannot be shuffled."""
    given = {"eval_dataset": HINTED.select([0]), "reward_funcs": None, "num_generations": 1, "learning_rate": 1e-12}
    found = [
        trained(train_dataset=HINTED, methods=methods, **given).evaluate()["eval_divergence/mean"]
        for methods in ([], [Shuffled()], [Unprivileged()])
    ]
    assert found == pytest.approx([found[0]] * 3, abs=1e-6)
