"""A teacher with uniform or non-finite outputs stops training before the student is changed by it."""

from __future__ import annotations

import pytest
import torch
from support import tiny

from trl_opsd import FixedRollout, OPSDTrainer


def poison_embedding(value):
    def change(model):
        model.model.embed_tokens.weight[50:120] = value

    return change


CASES = [
    (poison_embedding(float("nan")), FloatingPointError, "The teacher's logits are NaN or infinite"),
    pytest.param(
        poison_embedding(float("-inf")),
        FloatingPointError,
        "The teacher's logits are NaN or infinite",
        marks=pytest.mark.long,
    ),
    (lambda model: model.lm_head.weight[7].fill_(float("-inf")), FloatingPointError, "The teacher's logits are NaN"),
    (
        lambda model: model.lm_head.weight.zero_(),
        ValueError,
        "gives all 259 tokens the same logit",
    ),
    (lambda model: model.model.norm.weight.zero_(), ValueError, "The teacher has the same hidden state at all"),
    pytest.param(
        lambda model: [p.zero_() for p in model.parameters()],
        ValueError,
        "The teacher has the same hidden state at all",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), CASES, ids=range(len(CASES)))
def test_a_broken_teacher_is_named_and_the_student_stays_unchanged(make_trainer, change, error, message):
    trainer = make_trainer(gradient_accumulation_steps=2)
    with torch.no_grad():
        change(trainer.teacher.model)  # before, it would be refused at construction
    before = tiny.weights(trainer)
    with pytest.raises(error, match=message):
        trainer.train()
    assert torch.equal(before, tiny.weights(trainer))


@pytest.mark.quick
def test_a_teacher_that_breaks_during_training_keeps_earlier_steps(make_trainer):
    seen = []

    class Breaking(OPSDTrainer):
        def teach(self, rollout, rows):
            seen.append(tiny.weights(self))
            targets = super().teach(rollout, rows)
            if len(seen) == 3:
                targets.hidden[0, 0, 0] = float("nan")
            return targets

    trainer = make_trainer(Breaking, max_steps=3)
    with pytest.raises(FloatingPointError, match="The teacher's logits are NaN"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(seen[2], tiny.weights(trainer))


def test_a_broken_student_is_named(make_trainer):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="The student's logits are NaN or infinite"):
        trainer.train()


def test_evaluation_refuses_a_broken_teacher(make_trainer):
    trainer = make_trainer(eval_dataset=tiny.rows())
    with torch.no_grad():
        trainer.teacher.model.lm_head.weight.zero_()
    with pytest.raises(ValueError, match="same logit"):
        trainer.evaluate()


def test_repeated_tokens_do_not_make_a_teacher_look_broken(make_trainer):
    """Rotary positions are relative: after equal tokens the states may be equal."""
    trainer = make_trainer(max_steps=1)
    prompts = trainer.tokenize(tiny.PROMPTS)
    trainer.rollout = FixedRollout({tuple(prompt): [68, 68, 68] for prompt in prompts})
    trainer.train()


@pytest.mark.parametrize("temperature", [1e-3, 1000.0])
def test_no_temperature_makes_a_sound_teacher_look_uniform(trained, temperature):
    trainer = trained(temperature=temperature, max_steps=1)
    assert trainer.state.global_step == 1


def test_a_zeroed_teacher_is_refused_at_a_higher_temperature(make_trainer):
    trainer = make_trainer(eval_dataset=tiny.rows(), temperature=2.0)
    with torch.no_grad():
        trainer.teacher.model.lm_head.weight.zero_()
    with pytest.raises(ValueError, match="same logit"):
        trainer.evaluate()
