"""The verbs that a subclass overrides, and the numbers that it records, are checked before they can do harm."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from trl_opsd import OPSDTrainer


class Misspelt(OPSDTrainer):
    def wiegh(self, rollout, rows, targets):
        return rollout.weights


class Short(OPSDTrainer):
    def weigh(self, rollout, rows):
        return rollout.weights


class Long(OPSDTrainer):
    def complete(self, prompt_ids, step):
        return []


class Free(OPSDTrainer):
    def weigh(self, rollout, *others):
        return super().weigh(rollout, *others)

    def weights_of(self):
        return None

    def completed(self):
        return None

    def teacher_says(self):
        return None


@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Misspelt, "`Misspelt.wiegh` is never called; did you mean `weigh`"),
        (Short, r"`Short.weigh` is called as `\(rollout, rows, targets\)`: too many positional arguments"),
        (Long, r"`Long.complete` is called as `\(prompt_ids\)`: missing a required argument: 'step'"),
    ],
)
def test_misspelt_and_miscalled_verbs_are_refused_before_loading(make_trainer, cls, words):
    with pytest.raises(TypeError, match=words):
        make_trainer(cls)


def test_own_methods_are_free(make_trainer):
    make_trainer(Free, max_steps=1).train()


def test_a_tensor_is_recorded_as_a_number(make_trainer):
    class Recording(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            self.record("mine", rollout.weights.mean())
            return rollout.weights

    trainer = make_trainer(Recording, max_steps=1, logging_steps=1)
    trainer.train()
    assert isinstance(trainer.state.log_history[0]["mine"], float)


@pytest.mark.parametrize("value", [torch.ones(2), "three", None])
def test_recording_a_non_number_is_refused(make_trainer, value):
    with pytest.raises(ValueError, match=r"`record\('mine', .*expected one number"):
        make_trainer().record("mine", value)


@pytest.mark.parametrize("name", ["loss", "divergence/mean", "learning_rate", "time/complete"])
def test_recording_under_a_taken_name_is_refused(make_trainer, name):
    with pytest.raises(ValueError, match=f"`record\\('{name}', ...\\)`: this name is already used in the log"):
        make_trainer().record(name, 1.0)


def test_an_evaluation_without_a_token_has_no_loss(make_trainer, caplog):
    class Nothing(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            return torch.zeros_like(rollout.weights)

    metrics = make_trainer(Nothing, eval_dataset=tiny.rows()).evaluate()
    assert math.isnan(metrics["eval_loss"])
    assert "This evaluation had no token in the loss, so `eval_loss` is unknown" in caplog.text
