"""A trainer is used again after other things happened in its process: other configs and trainers, other options."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support import tiny

from trl_opsd import HFRollout

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("use", ["train", "evaluate", "predict", "repr"])
def test_another_config_leaves_a_trainer_usable(make_trainer, tmp_path, use):
    trainer = make_trainer(eval_dataset=tiny.rows(2), max_steps=1)
    tiny.config(tmp_path / "other")  # which resets the state that all trainers of a process share
    if use == "repr":
        assert "  1, on cpu\n" in repr(trainer)
    elif use == "predict":
        assert len(trainer.predict(tiny.rows(2)).predictions) == 2
    elif use == "evaluate":
        assert trainer.evaluate()["eval_loss"] > 0
    else:
        trainer.train()
        assert trainer.state.global_step == 1


def test_each_trainer_keeps_its_own_precision(make_trainer, trained):
    alone = trained()
    first, second = make_trainer(), make_trainer(bf16=True)
    assert second.accelerator.mixed_precision == "bf16"
    first.train()
    assert first.accelerator.mixed_precision == "no"
    assert tiny.logged(first, "loss") == pytest.approx(tiny.logged(alone, "loss"), abs=1e-6)
    second.train()
    assert second.accelerator.mixed_precision == "bf16"
    assert tiny.logged(second, "loss") != pytest.approx(tiny.logged(alone, "loss"), abs=1e-6)


def lora(**options):
    return LoraConfig(r=4, target_modules="all-linear", **options)


@pytest.mark.parametrize("kind", [None, "base", "ema"])
def test_student_with_a_leftover_adapter_is_refused_until_unloaded(make_trainer, kind):
    def build(model, peft_config):
        given = {} if kind is None else {"teacher_model": None, "teacher_model_kind": kind}
        rows = tiny.rows().add_column("privileged_context", ["a hint"] * 8)
        return make_trainer(model=model, peft_config=peft_config, train_dataset=rows, max_steps=1, **given)

    student = tiny.qwen2()
    before = {name: one.clone() for name, one in student.named_parameters()}
    trainer = build(student, lora())
    trainer.train()
    for again in (lora(), None):
        with pytest.raises(
            ValueError, match=r"`model` still contains the adapter .*`model = trainer\.model\.unload\(\)`"
        ):
            build(student, again)
    further = build(trainer.model, None)
    assert further.model is trainer.model
    student = trainer.model.unload()
    assert all(torch.equal(one, before[name]) for name, one in student.named_parameters())
    anew = build(student, lora())
    anew.train()
    assert tiny.logged(anew, "loss") == tiny.logged(trainer, "loss")


def test_trainers_repeat_each_other_unless_random_numbers_are_drawn_between(make_trainer):
    def made():
        return make_trainer(rollout=HFRollout(), max_steps=2, max_completion_length=8)

    def run(trainer):
        trainer.train()
        return tiny.logged(trainer, "loss")

    expected = run(made())
    assert run(made()) == expected, "after another has been built and trained"
    first, second = made(), made()
    assert run(first) == expected, "building another leaves the random state as it was"
    assert run(second) != expected, "training draws from the one that all trainers share"
    second = made()
    torch.rand(1)
    assert run(second) != expected


def test_teacher_left_in_training_mode_reads_without_dropout(make_trainer):
    teacher, modes = tiny.qwen2(48, seed=1), []
    trainer = make_trainer(teacher_model=teacher, max_steps=1)
    teacher.train()
    teacher.model.register_forward_hook(lambda module, *_: modes.append(module.training))
    trainer.train()
    assert modes == [False]
    assert teacher.training


def test_a_student_frozen_since_is_refused_when_training_begins(make_trainer):
    trainer = make_trainer()
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^The student is frozen: .* `requires_grad_\(True\)`"):
        trainer.train()
