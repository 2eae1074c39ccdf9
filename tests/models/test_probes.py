"""Errors of a model that is probed say what it cannot do; and the proof that a student can be trained."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support import tiny

from trl_opsd.models.probes import explaining


@pytest.mark.quick
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyError("other")])
def test_memory_and_unforeseen_errors_are_raised_as_they_are(error):
    with pytest.raises(type(error)) as raised, explaining("It", "read", "Use another.", (TypeError, RuntimeError)):
        raise error
    assert raised.value is error


# ---- Whether a student can be trained --------------------------------------------------------------------------------


def test_a_student_that_fails_only_in_training_mode_is_refused(make_trainer):
    student = tiny.qwen2()

    def fails(module, *_):
        if module.training:
            raise ValueError("256 tokens or none")

    student.model.layers[0].register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match=r"eight tokens in training mode, ValueError: 256 tokens or none"):
        make_trainer(model=student)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_student_that_passes_no_gradient_is_refused(make_trainer, lora):
    student = tiny.qwen2()
    student.model.norm.register_forward_hook(lambda module, args, output: output.detach())
    adapter = LoraConfig(target_modules="all-linear") if lora else None
    with pytest.raises(ValueError, match=r"No gradient passes through the student"):
        make_trainer(model=student, peft_config=adapter)


def test_a_student_with_only_a_trainable_head_is_trained(trained):
    student = tiny.qwen2()
    student.model.requires_grad_(False)
    before = student.lm_head.weight.detach().clone()
    trainer = trained(model=student)
    assert not torch.equal(trainer.model.lm_head.weight, before)
