"""A teacher, or another model, generates in place of the student: to be measured, and for nothing else."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from support import tiny

from trl_opsd import HFRollout, OPSDTrainer

TEACHERS = {"math": tiny.qwen2(48, 1), "prose": tiny.llama(32, 2)}
ROWS = tiny.rows(4).add_column("teacher", ["math", "prose"] * 2)
GREEDY = {"rollout": HFRollout, "eval_temperature": 0.0, "max_completion_length": 8, "train_dataset": ROWS}


@pytest.fixture
def trainer(make_trainer) -> Any:
    return make_trainer(teacher_model=dict(TEACHERS), **{**GREEDY, "rollout": HFRollout()})


def written(trainer: OPSDTrainer) -> list[list[int]]:
    """Its completions of all rows, greedily."""
    return [[one for one in ids if one >= 0] for ids in trainer.predict(ROWS).predictions.tolist()]


def of_model(model: Any) -> list[list[int]]:
    """The same by `generate`, row by row."""
    words, found = tiny.tokenizer(), []
    for prompt in ROWS["prompt"]:
        ids = torch.tensor([words(prompt)["input_ids"]])
        said = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=words.pad_token_id)
        found.append(said[0, ids.size(1) :].tolist())
    return found


@pytest.mark.quick
def test_each_generates_for_all_rows_and_the_student_afterwards(trainer):
    mine, other = of_model(trainer.model), tiny.qwen2(40, 3)
    with trainer.generating_with("math"):
        assert written(trainer) == of_model(TEACHERS["math"]) != mine
        with trainer.generating_with("prose"):
            assert written(trainer) == of_model(TEACHERS["prose"])
        assert written(trainer) == of_model(TEACHERS["math"]), "after the inner one"
    with trainer.generating_with(other):
        assert written(trainer) == of_model(other)
    with suppress(KeyError), trainer.generating_with("math"):
        raise KeyError
    assert written(trainer) == mine, "after an exception"
    assert all(one.requires_grad for one in other.parameters())


def test_a_subclass_does_not_keep_it_away(make_trainer):
    class Own(OPSDTrainer):
        def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
            return [[20, 21] for _ in prompt_ids]

    made = make_trainer(Own, teacher_model=dict(TEACHERS), **{**GREEDY, "rollout": HFRollout()})
    assert written(made) == [[20, 21]] * 4
    with made.generating_with("math"):
        assert written(made) == of_model(TEACHERS["math"])


@pytest.mark.refusal
@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_what_would_be_logged_as_the_students_is_refused(trainer, method):
    with trainer.generating_with("math"), pytest.raises(ValueError, match=f"`{method}` within `generating_with`"):
        getattr(trainer, method)(*([ROWS] if method == "evaluate" else []))
    with pytest.raises(ValueError, match="expected a model, or one of"), trainer.generating_with("maths"):
        pass
