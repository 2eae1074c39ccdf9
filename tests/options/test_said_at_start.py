"""What a trainer says when it is built, about options without effect and teachers that teach nothing."""

from __future__ import annotations

import pytest
from datasets import Dataset
from support import tiny

from trl_opsd import HFRollout
from trl_opsd.options.rules import check_together

NOTHING = "The first divergence is 0"


# ---- A teacher that is the student ----------------------------------------------------------------------------------


def test_first_divergence_of_zero_warns_once(make_trainer, caplog):
    make_trainer(model=tiny.qwen2(32, 0), teacher_model=tiny.qwen2(32, 0), max_steps=2).train()
    assert caplog.text.count(NOTHING) == 1


def test_first_divergence_above_zero_does_not_warn(make_trainer, caplog):
    make_trainer(max_steps=1).train()
    assert NOTHING not in caplog.text


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


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_a_divergence_may_be_assigned_by_name(make_trainer, name):
    trainer = make_trainer()
    trainer.divergence = name
    assert trainer.divergence == make_trainer(divergence=name).divergence
    assert trainer.train().training_loss == make_trainer(divergence=name).train().training_loss


# ---- Launches and evaluations ---------------------------------------------------------------------------------------


def test_launch_counted_as_one_process_is_refused(tmp_path, monkeypatch):
    args = tiny.config(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes .* `use_cpu=True`"):
        check_together(args)


@pytest.mark.quick
@pytest.mark.parametrize("option", ["fp16_full_eval", "bf16_full_eval"])
def test_full_eval_casts_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match=f"`{option}`.* would cast"):
        tiny.config(tmp_path, **{option: True})


def test_an_evaluation_of_no_rows_is_refused(make_trainer):
    trainer = make_trainer()
    for run in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the dataset is empty: pass one with rows"):
            run(tiny.rows(0))


def test_teacher_text_beside_student_messages_warns(make_trainer, caplog):
    rows = [{"prompt": [{"role": "user", "content": "2+2="}], "teacher_prompt": "The answer is 4. 2+2="}] * 8
    make_trainer(train_dataset=Dataset.from_list(rows), rollout=HFRollout(), max_steps=1).train()
    assert "The prompts are text for the teacher but messages for the student" in caplog.text
