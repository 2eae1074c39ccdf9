"""A trainer that was interrupted can train again, as in a notebook, as if nothing had happened."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from support import tiny
from transformers import TrainerCallback

from trl_opsd import FixedRollout, OPSDTrainer


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
    """Counts the NEFTune hooks after each step."""

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

    rollout = Interrupted(tiny.recorded(tiny.tokenizer()))
    trainer = make_trainer(rollout=rollout, eval_dataset=tiny.rows(8), per_device_eval_batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.evaluate()
    trainer.record("mine", 1.0)
    assert len(trainer._metrics["eval"]["entropy"]) == 1, "that of its first batch"
    rollout.at = 0
    trainer.evaluate()
    fresh = make_trainer(eval_dataset=tiny.rows(8), per_device_eval_batch_size=2)
    fresh.evaluate()
    name = "eval_completions/mean_length"
    assert trainer.state.log_history[-1][name] == fresh.state.log_history[-1][name]


def test_jit_checkpoints_outside_the_main_thread_are_refused(make_trainer):
    def trained(**given: Any) -> tuple[OPSDTrainer, list[Exception]]:
        trainer, errors = make_trainer(max_steps=1, **given), []

        def train() -> None:
            try:
                trainer.train()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=train, name="worker")
        thread.start()
        thread.join()
        return trainer, errors

    trainer, [error] = trained(enable_jit_checkpoint=True)
    assert isinstance(error, ValueError)
    assert "signal only works in main thread" in str(error)
    assert trainer.state.global_step == 0
    trainer, errors = trained()
    assert (trainer.state.global_step, errors) == (1, [])
