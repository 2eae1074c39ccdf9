"""The verbs that a subclass overrides, and the numbers that it records, are checked before they can do harm."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from support import tiny
from trl import DistillationTrainer, GRPOTrainer
from trl.experimental.gkd import GKDTrainer

from trl_opsd import OPSDTrainer
from trl_opsd.loop.overrides import _UNCALLED


class OfGKD(OPSDTrainer):
    @staticmethod
    def generalized_jsd_loss(student_logits, teacher_logits, **_):
        return (student_logits - teacher_logits).square().mean()


class OfTRL(OPSDTrainer):
    def _get_last_hidden_state(self, *given, **named):
        return super()._get_last_hidden_state(*given, **named)


class OfGRPO(OPSDTrainer):
    def _calculate_rewards(self, inputs, *others):
        return torch.zeros(len(inputs), 1)


class Free(OPSDTrainer):
    def weigh(self, rollout, *others):
        return super().weigh(rollout, *others)

    def weights_of(self):
        return None

    def completed(self):
        return None

    def teacher_says(self):
        return None

    def compare(self, *given):
        [self._log_metric("mine", one) for one in (1.0, 2.0)]
        return super().compare(*given)

    def _log_metric(self, name, value):
        self.record(name, value)


@pytest.mark.before_loading
@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (OfGKD, "`OfGKD.generalized_jsd_loss` is never called, unlike in TRL's trainer: pass a `divergence`"),
        (OfTRL, "`OfTRL._get_last_hidden_state` is never called, unlike in TRL's trainer: override `teach`"),
        (OfGRPO, "`OfGRPO._calculate_rewards` is never called, unlike in TRL's trainer: pass `reward_funcs`"),
    ],
)
def test_overrides_that_nothing_calls_are_refused_before_loading(make_trainer, cls, words):
    with pytest.raises(TypeError, match=words):
        make_trainer(cls)


def test_own_methods_are_free(trained):
    trainer = trained(Free, max_steps=1)
    assert trainer.state.log_history[0]["mine"] == 1.5, "a name of TRL's that the subclass calls itself"


def test_trl_methods_that_are_never_called_are_in_table(trained):
    """Those of GRPO and GKD that this trainer lacks, and of its base class those that a training leaves out."""
    theirs = {name for one in (GRPOTrainer, GKDTrainer) for name, value in vars(one).items() if callable_of(value)}
    helpers = {"_log_metric", "_log_completion_extra"}
    assert {name for name in theirs if not hasattr(OPSDTrainer, name)} <= _UNCALLED.keys() | helpers
    called = set()

    def counted(name):
        def method(self, *given, **named):
            called.add(name)
            return getattr(OPSDTrainer, name)(self, *given, **named)

        return method

    own = [name for name, value in vars(DistillationTrainer).items() if callable_of(value) and name != "__init__"]
    counting = type("Counting", (OPSDTrainer,), {name: counted(name) for name in own if name not in _UNCALLED})
    saves = {"save_strategy": "steps", "save_steps": 1, "remove_unused_columns": True}
    trainer = trained(counting, max_steps=1, eval_dataset=tiny.rows(2), **saves)
    trainer.evaluate()
    written = {"_generate", "_generate_single_turn", "_tokenize_prompts", "_tool_call_loop"}
    assert set(own) & _UNCALLED.keys() == {"_get_last_hidden_state", *written}
    assert set(own) - called - _UNCALLED.keys() == {"_get_tool_suffix_ids"}, "without tools"


def callable_of(value):
    return inspect.isfunction(getattr(value, "__func__", value))


def test_a_tensor_is_recorded_as_a_number(trained):
    class Recording(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            self.record("mine", rollout.weights.mean())
            return rollout.weights

    trainer = trained(Recording, max_steps=1, logging_steps=1)
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
    assert "`eval_loss` is unknown: it has no token in the loss" in caplog.text


def test_a_misspelt_verb_is_refused(make_trainer):
    class Misspelt(OPSDTrainer):
        def wiegh(self, rollout, rows, targets):
            return rollout.weights

        def complete_with_hints(self):
            """A helper."""

    with pytest.raises(TypeError, match=r"^`Misspelt.wiegh` is never called; did you mean `weigh`"):
        make_trainer(Misspelt)
