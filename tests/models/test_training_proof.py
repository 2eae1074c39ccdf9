"""Students that fail only in training mode are refused before the first rollout."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support import tiny


def test_a_student_that_fails_only_in_training_mode_is_refused(make_trainer):
    student = tiny.qwen2()

    def fails(module, *_):
        if module.training:
            raise ValueError("256 tokens or none")

    student.model.layers[0].register_forward_pre_hook(fails)
    with pytest.raises(
        ValueError, match=r"cannot run on eight tokens in training mode, ValueError: 256 tokens or none"
    ):
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


def test_the_training_proof_takes_one_pass_of_eight_tokens(make_trainer):
    passes, student = [], tiny.gpt2(dropout=0.5)
    student.base_model.h[0].register_forward_pre_hook(
        lambda module, args: passes.append(args[0].shape[:2].numel()) if module.training else None
    )
    make_trainer(model=student)
    assert passes == [8]
