"""With `bf16=True` all products are in bfloat16, and nothing else is; dtypes that cannot be right are refused."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from peft import LoraConfig
from products import PHASES, WatchedTrainer

from trl_opsd import HFRollout
from trl_opsd.precision import autocast

BF16 = ["bfloat16"]
KINDS = {
    "another": {},
    "base": {"teacher_model_kind": "base"},
    "live": {"teacher_model_kind": "live"},
    "ema": {"teacher_model_kind": "ema"},
    "several": {"teachers": 2},
}


@pytest.fixture
def watched(make_trainer):
    """A trainer that writes its own completions, evaluates, and says what it has multiplied."""

    def make(kind: str = "another", lora: bool = False, **options):
        options = {**KINDS[kind], **options}
        rows = tiny.rows()
        if options.pop("teachers", 1) > 1:
            options["teacher_model"] = {"a": tiny.qwen2(48, seed=1), "b": tiny.llama(64, seed=2)}
            rows = rows.add_column("teacher", ["a", "b"] * 4)
        elif kind != "another":
            options["teacher_model"] = None
            rows = rows.add_column("privileged_context", ["hint"] * 8)
        if lora:
            options["peft_config"] = LoraConfig(r=4, target_modules="all-linear")
        return make_trainer(
            WatchedTrainer, rollout=HFRollout(), train_dataset=rows, eval_dataset=rows, max_steps=1, **options
        )

    return make


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("another", False), ("several", True), ("base", True), ("live", False), ("ema", True)],
)
def test_every_product_is_in_bfloat16_and_every_weight_stays_as_it_was(watched, kind, lora):
    trainer = watched(kind, lora, bf16=True)
    trainer.train()
    assert trainer.dtypes() == dict.fromkeys(PHASES, BF16)
    trainer.evaluate()
    assert trainer.dtypes() == {phase: BF16 for phase in PHASES if phase != "backward"}
    assert {str(parameter.dtype) for parameter in trainer.model.parameters()} == {"torch.float32"}


def test_a_student_rounds_each_weight_once_for_all_tokens_it_writes(watched):
    trainer = watched(bf16=True)
    with trainer.products:
        trainer.complete(trainer.tokenize(tiny.PROMPTS[:2]))
    assert trainer.products.rounded_weights == sum(one.dim() > 1 for one in trainer.model.parameters()) - 1  # embedding


def test_loss_and_gradient_are_as_near_to_float64_as_naive_autocast(make_trainer):
    trainer = make_trainer(bf16=True, beta=0.0)
    student, teacher = trainer.model.eval(), trainer.teacher.model
    ids = torch.randint(3, tiny.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    rollout = tiny.rollout(ids[:, :8], ids[:, 8:], torch.ones_like(ids[:, 8:]))

    def naive(student, teacher):
        theirs, ours = (
            model(ids, use_cache=False).logits[:, 7:-1].to(wide).log_softmax(-1) for model in (teacher, student)
        )
        return (theirs.exp() * (theirs - ours)).sum(-1).mean()

    with autocast(trainer.accelerator):
        wide = torch.float32
        rounded = gradients(naive(student, teacher), student)
        loss = trainer.compare(student, rollout, trainer.teacher.targets(rollout), None).loss
    found = gradients(loss, student)
    wide, exact = torch.float64, copy.deepcopy(student).double()
    truth = gradients(naive(exact, copy.deepcopy(teacher).double()), exact)
    errors = [[float((a.double() - b).norm()) for a, b in zip(those, truth, strict=True)] for those in (found, rounded)]
    print("error of loss and gradient:", *errors)
    assert all(mine <= naives for mine, naives in zip(*errors, strict=True))
    assert errors[0][1] > 1e-4 * float(truth[1].norm()), "nothing was rounded"


def gradients(loss, model):
    """The loss, and its gradient in one piece."""
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert {one.dtype for one in found} == {next(model.parameters()).dtype}
    return loss.detach(), torch.cat([one.flatten() for one in found])
