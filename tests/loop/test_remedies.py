"""Anchors, short completions first, and the student as it was passed; `equivalence/test_pairs.py` has the losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from small_methods import ShortAtFirst
from support import tiny
from support.rollouts import Answering

from trl_opsd import HFRollout, OPSDTrainer

WORDS = tiny.tokenizer()


def answer(prompt_ids: list[int]) -> list[int]:
    start = sum(prompt_ids)
    return [5 + (start + 3 * place) % 60 for place in range(3 + start % 5)] + [WORDS.eos_token_id]


def rows(**columns: list[Any]) -> Dataset:
    contexts = {
        "privileged_context": [f"hint {row}" for row in range(8)],
        "contrast_context": [f"wrong {7 * row % 5}" for row in range(8)],
    }
    return Dataset.from_dict({"prompt": tiny.PROMPTS, **contexts, **columns})


OPTIONS = {"train_dataset": rows(), "rollout": Answering(answer), "learning_rate": 1e-2}


@pytest.mark.parametrize("options", [{}, {"extrapolation": 1.25}, {"contrast_weight": 0.5}], ids=str)
def test_a_student_has_not_left_its_anchor_at_first(trained, options):
    options |= {"student_temperature": 1.4, "teacher_temperature": 0.6, "optim": "sgd", "max_steps": 2}
    first, second = tiny.logged(trained(anchor_weight=0.3, **OPTIONS, **options), "anchor/mean")
    assert abs(first) < 1e-6 < second


# ---- Short completions first -----------------------------------------------------------------------------------------


def test_completions_grow_to_their_limit_also_after_a_resume(make_trainer, tmp_path):
    class Noting(OPSDTrainer):
        def teach(self, rollout, rows):
            if self.model.training:
                longest.append(rollout.completion_mask.sum(1).max().item())
            return super().teach(rollout, rows)

    def built():
        return make_trainer(
            Noting, rollout=HFRollout(), methods=[ShortAtFirst(4, 4)], max_completion_length=20, max_steps=6,
            learning_rate=1e-9, save_strategy="steps", save_steps=2,
        )  # fmt: skip

    longest, limits = [], [4, 8, 12, 16, 20, 20]
    trainer = built()
    trainer.train()
    assert tiny.logged(trainer, "completions/limit") == longest == limits
    assert trainer.predict(tiny.rows(4)).predictions.shape[1] > 16, "an evaluation has the whole length"
    again = built()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert tiny.logged(again, "completions/limit") == limits


# ---- The student as it was passed ------------------------------------------------------------------------------------


def test_it_stays_when_a_run_resumes(make_trainer, tmp_path):
    options = {
        **OPTIONS, "max_steps": 4, "anchor_weight": 0.2, "extrapolation": 1.2, "contrast_weight": 0.5,
        "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    whole, resumed = make_trainer(**options), make_trainer(**options)
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))
    for mine, first in zip(resumed.teachers.origin.model.parameters(), tiny.qwen2(32).parameters(), strict=True):
        assert torch.equal(mine, first)


def test_it_is_the_base_teacher_where_there_is_one(make_trainer):
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "anchor_weight": 0.2, "train_dataset": rows()}
    trainer = make_trainer(teacher_model=None, teacher_model_kind="base", **lora)
    assert trainer.teachers.origin is trainer.teacher
    moved = make_trainer(teacher_model=None, teacher_model_kind="ema", **lora)
    assert moved.teachers.origin is not moved.teacher
    assert moved.teachers.origin.model is moved.model, "without its adapter: no copy"
