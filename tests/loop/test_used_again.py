"""A trainer is used again after other things happened in its process: other configs and trainers, interruptions."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import tiny
from transformers import TrainerCallback

from trl_opsd import FixedRollout, HFRollout, OPSDTrainer


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
def test_student_with_a_leftover_adapter_is_refused_until_unloaded(make_trainer):
    def build(model, peft_config):
        return make_trainer(model=model, peft_config=peft_config, max_steps=1)

    lora, student = LoraConfig(r=4, target_modules="all-linear"), tiny.qwen2()
    before = {name: one.clone() for name, one in student.named_parameters()}
    trainer = build(student, lora)
    trainer.train()
    for again in (lora, None):
        with pytest.raises(ValueError, match=r"`model` still contains the adapter .*unload\(\)`"):
            build(student, again)
    assert build(trainer.model, None).model is trainer.model
    student = trainer.model.unload()
    assert all(torch.equal(one, before[name]) for name, one in student.named_parameters())
    anew = build(student, lora)
    anew.train()
    assert tiny.logged(anew, "loss") == tiny.logged(trainer, "loss")


@pytest.mark.quick
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


@pytest.mark.quick
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


# ---- Interrupted, as in a notebook -----------------------------------------------------------------------------------


class Impatient(TrainerCallback):
    """Presses Ctrl-C once, at one event of the second step."""

    def __init__(self, event: str) -> None:
        self.pressed = False
        setattr(self, event, self.press)

    def press(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 1 and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt


EVENTS = ["on_substep_end", "on_prediction_step", "on_save"]
MORE_EVENTS = ["on_step_begin", "on_pre_optimizer_step", "on_log"]


def hooks(trainer: OPSDTrainer) -> list[str]:
    """Names of all hooks on the student, except the one that gradient checkpointing keeps."""
    found = [
        getattr(hook, "__qualname__", repr(hook))
        for module in trainer.model.modules()
        for kind in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in kind.values()
    ]
    return [name for name in found if not name.endswith("make_inputs_require_grads")]


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.noise: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        hooks = model.get_input_embeddings()._forward_hooks.values()
        self.noise.append(sum(hook.__name__ == "neftune_post_forward_hook" for hook in hooks))


@pytest.mark.parametrize("event", [*EVENTS, *(pytest.param(event, marks=pytest.mark.long) for event in MORE_EVENTS)])
def test_an_interrupted_training_leaves_nothing_behind(make_trainer, event):
    watch = Watch()
    before_sigterm = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(
        callbacks=[Impatient(event), watch], neftune_noise_alpha=5.0, enable_jit_checkpoint=True,
        gradient_accumulation_steps=2, eval_dataset=tiny.rows(4), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=2, save_strategy="steps", save_steps=1, gradient_checkpointing=True,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert hooks(trainer) == []
    assert signal.getsignal(signal.SIGTERM) is before_sigterm
    assert not trainer.is_in_train
    watch.noise.clear()

    again = trainer.train()
    assert again.global_step == 3
    assert watch.noise == [1, 1, 1], "the noise is added once"
    assert hooks(trainer) == []
    fresh = make_trainer(model=trainer.model, eval_dataset=tiny.rows(4), per_device_eval_batch_size=2)
    fresh.evaluate()
    trainer.evaluate()
    entries = [one.state.log_history[-1] for one in (trainer, fresh)]
    same = ("eval_loss", "eval_completions/mean_length", "eval_entropy", "eval_divergence/mean")
    assert [entries[0][name] for name in same] == [entries[1][name] for name in same]


def test_an_interrupted_evaluation_does_not_affect_the_next_one(make_trainer):
    class Interrupted(FixedRollout):
        asked, at = 0, 2

        def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
            self.asked += 1
            if self.asked == self.at:
                raise KeyboardInterrupt
            return super().complete(prompt_ids, step)

    given = {"eval_dataset": tiny.rows(8), "per_device_eval_batch_size": 2}
    trainer = make_trainer(rollout=Interrupted(tiny.recorded(tiny.tokenizer())), **given)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    assert len(trainer._metrics["eval"]["entropy"]) == 1, "that of its first batch"
    found, expected = trainer.evaluate(), make_trainer(**given).evaluate()
    assert found["eval_completions/mean_length"] == expected["eval_completions/mean_length"]
