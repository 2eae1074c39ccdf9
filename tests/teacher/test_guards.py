"""A teacher with uniform or non-finite outputs stops training before the student is changed by it."""

from __future__ import annotations

import pytest
import torch
from support import tiny

from trl_opsd import FixedRollout


def poison_embedding(value):
    def change(model):
        model.model.embed_tokens.weight[50:120] = value

    return change


CASES = {
    "NaN": (poison_embedding(float("nan")), FloatingPointError, "The teacher's logits are NaN or infinite"),
    "a row of the head": (
        lambda model: model.lm_head.weight[7].fill_(float("-inf")), FloatingPointError, "The teacher's logits are NaN",
    ),
    "the head": (lambda model: model.lm_head.weight.zero_(), ValueError, "gives all 259 tokens the same logit"),
    "the norm": (
        lambda model: model.model.norm.weight.zero_(), ValueError, "The teacher has the same hidden state at all",
    ),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_a_broken_teacher_is_named_and_the_student_stays_unchanged(make_trainer, case):
    change, error, message = CASES[case]
    trainer = make_trainer(gradient_accumulation_steps=2)
    with torch.no_grad():
        change(trainer.teacher.model)  # before, it would be refused at construction
    before = tiny.weights(trainer)
    with pytest.raises(error, match=message):
        trainer.train()
    assert torch.equal(before, tiny.weights(trainer))


def test_a_broken_student_is_named(make_trainer):
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="The student's logits are NaN or infinite"):
        trainer.train()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_evaluation_refuses_a_broken_teacher(make_trainer, temperature):
    trainer = make_trainer(eval_dataset=tiny.rows(), temperature=temperature)
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
