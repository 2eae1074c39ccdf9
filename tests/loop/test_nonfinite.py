"""Steps and evaluations with non-finite numbers, in one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from peft import LoraConfig
from support import faults, tiny

from trl_opsd import OPSDTrainer
from trl_opsd._compat.deepspeed import settings_without_gradient_check


def poison(trainer, side, steps=(2,)):
    faults.poison(trainer, side, steps, rank=0)
    watching = faults.Watching(trainer.model)
    trainer.add_callback(watching)
    return watching


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4, target_modules="all-linear")], ids=["full", "lora"])
@pytest.mark.parametrize("side", ["teacher", "student", "gradient"])
def test_skipped_step_changes_nothing(make_trainer, caplog, side, lora):
    trainer = make_trainer(nonfinite="skip", peft_config=lora, lr_scheduler_type="linear", weight_decay=0.1)
    watching = poison(trainer, side)
    trainer.train()
    assert faults.same(watching.before[2], watching.before[3])
    assert not faults.same(watching.before[3], watching.now())
    rates = tiny.logged(trainer, "learning_rate")
    assert rates[0] > rates[1] == rates[2]
    steps = {int(state["step"]) for state in trainer.optimizer.state.values()}
    assert steps == {2}
    assert tiny.logged(trainer, "nonfinite/skipped_steps") == [0, 1, 1]
    [said] = [one.getMessage() for one in caplog.records if "Skipped: " in one.getMessage()]
    assert side in said
    assert said.endswith("NaN or infinite in step 2.")


class Spoiled(OPSDTrainer):
    """Is given targets with an infinite number in one of its comparisons."""

    bad = 0
    """The first one, or a later one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = []

    def compare(self, student, rollout, targets, num_items):
        if len(self.parts) == self.bad:
            targets.hidden[0, 0, 0] = float("inf")
        self.parts.append(super().compare(student, rollout, targets, num_items))
        return self.parts[-1]


class SpoiledSecond(Spoiled):
    bad = 1


@pytest.mark.quick
def test_one_bad_micro_step_of_several_skips_the_whole_step(make_trainer, caplog):
    trainer = make_trainer(Spoiled, nonfinite="skip", gradient_accumulation_steps=2, max_steps=1)
    watching = faults.Watching(trainer.model)
    trainer.add_callback(watching)
    trainer.train()
    assert len(trainer.parts) == 2
    assert faults.same(watching.before[1], watching.now())
    assert caplog.text.count("Skipped: ") == 1


@pytest.mark.parametrize(("steps", "fails"), [((1, 3), False), ((2, 3), True)], ids=str)
def test_more_consecutive_skipped_steps_than_limit_are_an_error(make_trainer, steps, fails):
    trainer = make_trainer(nonfinite="skip", nonfinite_skip_limit=1)
    watching = poison(trainer, "gradient", steps)
    if fails:
        with pytest.raises(FloatingPointError, match=r"2 consecutive .* \(`nonfinite_skip_limit=1`\): the"):
            trainer.train()
        assert faults.same(watching.before[2], watching.now())
    else:
        trainer.train()
    assert trainer.state.global_step == (2 if fails else 3)


def test_non_finite_gradient_of_one_weight_changes_none(make_trainer):
    trainer = make_trainer(max_grad_norm=0.0)
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = [one.detach().clone() for one in trainer.model.parameters()]
    with pytest.raises(FloatingPointError, match=r"student's gradient is NaN or infinite in step 1: the student's wei"):
        trainer.train()
    assert faults.same(before, list(trainer.model.parameters()))


@pytest.mark.quick
def test_nan_in_evaluation_is_an_error_or_a_batch_that_does_not_count(make_trainer):
    given = {"eval_dataset": tiny.rows(4), "per_device_eval_batch_size": 2}
    with pytest.raises(FloatingPointError, match=r"NaN or infinite in an evaluation after step 0: "):
        make_trainer(SpoiledSecond, **given).evaluate()
    trainer = make_trainer(SpoiledSecond, nonfinite="skip", **given)
    loss = trainer.evaluate()["eval_loss"]
    tokens, divergence, *_ = trainer.parts[0].rows.sum(0).tolist()
    assert len(trainer.parts) == 2
    assert loss == pytest.approx(divergence / tokens, rel=1e-6)
    between = make_trainer(SpoiledSecond, nonfinite="skip", eval_strategy="steps", eval_steps=1, **given)
    between.train()
    assert tiny.logged(between, "nonfinite/skipped_steps") == [0, 0, 0], "no step is skipped for it"


class TestScaledLoss:
    """The loss scale of float16 grows until gradients overflow: the scaler itself skips those steps."""

    def scaling(self, make_trainer, monkeypatch, scale, **options):
        trainer = make_trainer(**options)
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
        return trainer

    def test_overflows_of_too_large_loss_scale_are_no_error(self, make_trainer, monkeypatch, caplog):
        trainer = self.scaling(make_trainer, monkeypatch, scale=2.0**120, max_steps=8, nonfinite_skip_limit=8)
        watching = faults.Watching(trainer.model)
        trainer.add_callback(watching)
        trainer.train()
        counts = [0, *(entry.get("nonfinite/skipped_steps", 0) for entry in trainer.state.log_history[:8])]
        unmoved = [faults.same(*pair) for pair in pairwise([*watching.before.values(), watching.now()])]
        assert [now > before for before, now in pairwise(counts)] == unmoved
        assert set(unmoved) == {True, False}
        assert "Skipped: " not in caplog.text

    def test_gradient_that_no_loss_scale_makes_finite_is_an_error(self, make_trainer, monkeypatch):
        trainer = self.scaling(make_trainer, monkeypatch, scale=1.0, nonfinite_skip_limit=2)
        watching = poison(trainer, "gradient", (1, 2, 3))
        with pytest.raises(FloatingPointError, match="3 consecutive optimizer steps"):
            trainer.train()
        assert faults.same(watching.before[1], watching.now())


@pytest.mark.parametrize(
    ("config", "blind"),
    [
        ({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, []),
        ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, ["zero_optimization.compute_grad_norm"]),
        ({"zero_optimization": {"stage": 1}, "bf16": {"check_grad_overflow": False}}, ["bf16.check_grad_overflow"]),
        ({"zero_optimization": {"stage": 0}}, ["zero_optimization.stage"]),
        ({}, ["zero_optimization.stage"]),
    ],
    ids=str,
)
def test_deepspeed_settings_that_skip_the_gradient_check_are_found(config, blind):
    assert settings_without_gradient_check(config) == blind
