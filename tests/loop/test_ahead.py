"""Rows of the next step are written while this one is learned: one step old, measured, bounded, and nothing else."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any, ClassVar

import pytest
import test_overlap
import torch
from support import tiny
from support.rollouts import Apart
from transformers import TrainerCallback

from trl_opsd import OPSDTrainer

STEPS = 4


class Noted(Apart):
    """Notes which weights wrote each batch: the number of steps, when its rows began."""

    def bind(self, trainer: Any) -> None:
        super().bind(trainer)
        self.trainer = trainer

    def stream(self, prompt_ids: list[list[int]], step: int) -> Any:
        self.events.append(("written by", self.trainer.state.global_step, len(prompt_ids)))
        return super().stream(prompt_ids, step)

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        if threading.current_thread() is threading.main_thread():  # else it is what `stream` replays
            self.events.append(("completed by", self.trainer.state.global_step, len(prompt_ids)))
        return super().complete(prompt_ids, step)


class Learning(OPSDTrainer):
    def compare(self, student, rollout, targets, num_items):
        if self.model.training:
            self.rollout.events.append(("learned by", self.state.global_step))
        return super().compare(student, rollout, targets, num_items)


def built(make_trainer, cls=Learning, **options):
    sizes = {"rows": 8 * STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    return test_overlap.built(make_trainer, cls, Noted, **{**sizes, **options})


def of_kind(trainer, *kinds: str) -> list[tuple[Any, ...]]:
    return [event for event in trainer.rollout.events if isinstance(event, tuple) and event[0] in kinds]


def test_rows_written_ahead_are_learned_one_step_later(make_trainer):
    waits, ahead = (built(make_trainer, overlap=overlap) for overlap in (None, "ahead"))
    waits.train()
    ahead.train()
    steps = of_kind(ahead, "completed by", "written by", "learned by")
    expected = [("completed by", 0, 8)]
    for step in range(STEPS):
        if step < STEPS - 1:
            expected.append(("written by", step, 8))
        expected += [("learned by", step)] * 2
    assert [event for event in steps if event not in of_kind(ahead, "row")] == expected
    assert tiny.logged(ahead, "overlap/staleness") == [0, 1, 1, 1]
    assert tiny.logged(ahead, "loss") == tiny.logged(waits, "loss"), "the same rows in the same order"
    assert tiny.logged(ahead, "num_tokens") == tiny.logged(waits, "num_tokens")
    assert torch.equal(tiny.weights(ahead), tiny.weights(waits))


def test_an_epoch_begins_with_rows_of_its_own(make_trainer):
    trainer = built(make_trainer, overlap="ahead", max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert tiny.logged(trainer, "overlap/staleness") == [0, 1, 1, 1] * 2
    assert len(of_kind(trainer, "completed by")) == 2


class EndsFirstEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 1


def test_an_epoch_that_ends_early_drops_rows_written_ahead(make_trainer):
    trainer = built(make_trainer, overlap="ahead", rows=24, max_steps=5, callbacks=[EndsFirstEpoch()])
    trainer.train()
    assert tiny.logged(trainer, "overlap/staleness") == [0, 0, 1, 1]


class Recalling(Learning):
    """Keeps its weights before each step, and the row that shows how far the step moves them."""

    kept: ClassVar[list[Any]] = []

    def _get_grad_norm(self, model, grad_norm=None):
        self.kept.append((copy.deepcopy(self.model).eval(), self._ahead.before_step[0]))
        return super()._get_grad_norm(model, grad_norm)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "model": tiny.gemma2}], ids=["qwen2", "gemma2"])
def test_overlap_divergence_is_that_from_the_student_before_the_step(make_trainer, options):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    Recalling.kept = []
    trainer = built(make_trainer, Recalling, overlap="ahead", learning_rate=1e-2, overlap_max_divergence=1e3, **options)
    trainer.train()
    models = [model for model, _ in Recalling.kept]
    expected = []
    for before, after, (_, rollout) in zip(models, models[1:], Recalling.kept, strict=False):
        assert 0 < rollout.weights.sum() <= 32
        both = []
        for model in (before, after):
            with torch.no_grad():
                logits = model(rollout.input_ids).logits.double()
            both.append((logits[0, -1 - rollout.completion_ids.size(1) : -1] / trainer.temperature).log_softmax(-1))
        expected.append(float((both[0].exp() * (both[0] - both[1])).sum(-1).mean()))
    assert min(expected) > 1e-3
    assert tiny.logged(trainer, "overlap/divergence") == pytest.approx(expected, rel=1e-3)


def test_rows_beyond_overlap_max_divergence_are_written_again(make_trainer, caplog):
    trainer = built(make_trainer, overlap="ahead", overlap_max_divergence=1e-12)
    trainer.train()
    assert [event[1] for event in of_kind(trainer, "completed by")] == list(range(STEPS))
    assert tiny.logged(trainer, "overlap/staleness") == [0] * STEPS
    assert min(tiny.logged(trainer, "overlap/divergence")) > 1e-12
    assert "more than `overlap_max_divergence=1e-12`" in caplog.text


def test_evaluation_waits_for_rows_being_written_ahead(make_trainer):
    given = {"eval_dataset": test_overlap.recorded(4)[0], "eval_strategy": "steps", "eval_steps": 2}
    trainer = built(make_trainer, overlap="ahead", **given)
    before = trainer.rollout._before
    trainer.rollout._before = lambda number: (before(number), time.sleep(0.05))
    trainer.train()
    events = trainer.rollout.events
    first = events.index(("completed by", 2, 4))
    assert events[:first].count("closed") == events[:first].count(("written by", 0, 8)) + 1, "both batches have ended"
    assert tiny.logged(trainer, "overlap/staleness") == [0, 1, 1, 1], "and are learned all the same"


def test_rows_written_ahead_are_dropped_when_training_fails(make_trainer):
    class Failing(Learning):
        def weigh(self, rollout, rows, targets):
            if self.state.global_step == 1:
                raise KeyboardInterrupt
            return rollout.weights

    trainer = built(make_trainer, Failing, overlap="ahead")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer._ahead._coming is None
    trainer.weigh = lambda rollout, rows, targets: rollout.weights
    trainer.train()
    assert tiny.logged(trainer, "overlap/staleness") == [0, 1, 1, 1]
