"""What a trainer says when it is built, about options and prompts without effect."""

from __future__ import annotations

import pytest
from datasets import Dataset
from support import tiny

from trl_opsd import HFRollout

# ---- A teacher that is the student ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "seed", "warnings"), [(32, 0, 1), (48, 1, 0)])
def test_first_divergence_of_zero_warns_once(trained, caplog, width, seed, warnings):
    trained(model=tiny.qwen2(32, 0), teacher_model=tiny.qwen2(width, seed), max_steps=2)
    assert caplog.text.count("The first divergence is 0") == warnings


# ---- What may be trained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"max_steps": 0},
        {"num_train_epochs": 0, "max_steps": -1},
        {"per_device_train_batch_size": 8},
    ],
)
def test_trainer_that_only_evaluates_may_be_frozen(make_trainer, options):
    trainer = make_trainer(
        model=tiny.qwen2().requires_grad_(False), train_dataset=None, eval_dataset=tiny.rows(), **options
    )
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_divergence_may_be_assigned_by_name(make_trainer):
    trainer, expected = make_trainer(), make_trainer(divergence="forward_kl")
    trainer.divergence = "forward_kl"
    assert trainer.divergence == expected.divergence
    assert trainer.train().training_loss == expected.train().training_loss
    with pytest.raises(ValueError, match="forward_kl"):
        trainer.divergence = "forwardkl"


def test_an_evaluation_of_no_rows_is_refused(make_trainer):
    trainer = make_trainer()
    for run in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the dataset is empty: pass one with rows"):
            run(tiny.rows(0))


def test_teacher_text_beside_student_messages_warns(make_trainer, caplog):
    rows = [{"prompt": [{"role": "user", "content": "2+2="}], "teacher_prompt": "The answer is 4. 2+2="}] * 8
    make_trainer(train_dataset=Dataset.from_list(rows), rollout=HFRollout(), max_steps=1).train()
    assert "The prompts are text for the teacher but messages for the student" in caplog.text
