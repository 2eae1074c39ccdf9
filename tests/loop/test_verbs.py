"""The verbs that a subclass overrides, and the numbers that it records, are checked before they can do harm."""

from __future__ import annotations

import math

import pytest
import torch
from support import tiny
from trl import DistillationTrainer

from trl_opsd import OPSDTrainer
from trl_opsd.loop.overrides import _OF_BATCHES


@pytest.mark.before_loading
@pytest.mark.parametrize("name", _OF_BATCHES)
def test_overrides_of_what_makes_a_batch_are_refused_before_loading(make_trainer, name):
    assert name in vars(DistillationTrainer), "else nothing would be refused"
    mine = type("Mine", (OPSDTrainer,), {name: lambda self, *given: None})
    with pytest.raises(TypeError, match=f"`Mine.{name}` makes batches in TRL, not here: override one of complete, "):
        make_trainer(mine)


@pytest.mark.parametrize("name", ["loss", "divergence/mean", "learning_rate", "time/complete"])
def test_recording_under_a_taken_name_is_refused(make_trainer, name):
    with pytest.raises(ValueError, match=f"`record\\('{name}', ...\\)`: this name is already used in the log"):
        make_trainer().record(name, 1.0)


def test_an_evaluation_without_a_token_has_no_loss(make_trainer):
    class Nothing(OPSDTrainer):
        def weigh(self, rollout, rows, targets):
            return torch.zeros_like(rollout.weights)

    metrics = make_trainer(Nothing, eval_dataset=tiny.rows()).evaluate()
    assert math.isnan(metrics["eval_loss"])


def test_a_misspelt_verb_is_refused(make_trainer):
    class Misspelt(OPSDTrainer):
        def wiegh(self, rollout, rows, targets):
            return rollout.weights

        def complete_with_hints(self):
            """A helper."""

    with pytest.raises(TypeError, match=r"^`Misspelt.wiegh` is never called; did you mean `weigh`"):
        make_trainer(Misspelt)
