"""The runner of probes: a start raises the first failure, an examination collects all findings; and the proof that a
student can be trained.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from support import tiny

from trl_opsd.models.probes import Doubt, Probe, explaining, findings, require


def raising(error: Exception):
    def run(subject):
        raise error

    return run


SOUND = Probe("sound", lambda subject: f"{subject} has {len(subject)}.")
DOUBTED = Probe("doubted", raising(Doubt("maybe")))
WRONG = Probe("wrong", raising(ValueError("got 1,\n expected 2: do")))


@pytest.mark.quick
def test_start_raises_the_first_failure_and_no_doubt():
    require([SOUND, DOUBTED], "four")
    with pytest.raises(ValueError, match="expected 2"):
        require([DOUBTED, WRONG, Probe("never run", pytest.fail)], "four")


@pytest.mark.quick
def test_examination_goes_on_and_skips_what_a_failure_would_repeat():
    needs = [Probe("second", pytest.fail, needs=("wrong",)), Probe("third", pytest.fail, needs=("sound", "second"))]
    silent, begun = Probe("silent", raising(RuntimeError())), []
    found = list(findings([SOUND, DOUBTED, WRONG, *needs, silent, SOUND], "four", begun.append))
    assert begun == ["sound", "doubted", "wrong", "second", "third", "silent", "sound"]
    assert [(one.verdict, one.said) for one in found] == [
        ("ok", "four has 4."),
        ("warning", "maybe"),
        ("failed", "got 1, expected 2: do"),
        ("skipped", "Needs: wrong."),
        ("skipped", "Needs: second."),
        ("failed", "RuntimeError"),
        ("ok", "four has 4."),
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TypeError("no mask"), ValueError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (KeyError("other"), KeyError),
    ],
)
def test_errors_of_the_subject_name_the_remedy_and_others_are_raised_as_they_are(error, expected):
    with pytest.raises(expected) as raised, explaining("The model", "read", "Use another.", (TypeError, RuntimeError)):
        raise error
    if expected is ValueError:
        assert str(raised.value) == "The model cannot read, TypeError: no mask. Use another."
    else:
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


def test_the_training_proof_takes_one_pass_of_eight_tokens(make_trainer):
    passes, student = [], tiny.gpt2(dropout=0.5)
    student.base_model.h[0].register_forward_pre_hook(
        lambda module, args: passes.append(args[0].shape[:2].numel()) if module.training else None
    )
    make_trainer(model=student)
    assert passes == [8]
