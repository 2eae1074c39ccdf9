"""Token weights from `weigh` apply to the loss, its gradient, its denominator and the logs."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from torch.nn.functional import kl_div

from trl_opsd import OPSDTrainer

PER_POSITION = torch.tensor([0.25, 3.0, 0.0, 1.0, 0.5])


class Weighing(OPSDTrainer):
    """Weights tokens by position."""

    def weigh(self, rollout, rows, targets):
        assert len(rows) == len(rollout.weights) == len(targets.hidden)
        width = rollout.weights.size(1)
        return (rollout.weights * PER_POSITION.repeat(width)[:width]).double()


def oracle(trainer, batch):
    """The weighted mean of a dense KL in float64, its gradient by autograd, and both entropies."""
    student, teacher = (model.double() for model in (trainer.model, trainer.teacher.model))
    rollout = batch.rollout
    ids, mask = rollout.input_ids, rollout.attention_mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    start = rollout.prompt_ids.size(1) - 1
    p, q = (
        model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, start:-1].log_softmax(-1)
        for model in (teacher, student)
    )
    width = p.size(1)
    weights = rollout.completion_mask * PER_POSITION.double().repeat(width)[:width]
    divergence = kl_div(q, p.detach(), reduction="none", log_target=True).sum(-1)
    loss = (weights * divergence).sum() / weights.sum()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in student.parameters()]
    trainer.model.float().zero_grad()
    trainer.teacher.model.float()
    entropies = [float(-(weights * (one.exp() * one).sum(-1)).sum().detach() / weights.sum()) for one in (q, p)]
    return loss.item(), gradients, entropies, weights


def scored(trainer):
    """The batches that it will score."""
    batches, score = [], trainer.score
    trainer.score = lambda rows: batches.append(score(rows)) or batches[-1]
    return batches


@pytest.mark.quick
def test_weights_apply_to_loss_gradient_denominator_and_logs(make_trainer):
    options = {"beta": 0.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    trainer = make_trainer(Weighing, optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **options)
    batches = scored(trainer)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.train()
    after = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    (batch,) = batches
    assert batch.rollout.weights.dtype == torch.float32
    with torch.no_grad():
        for parameter, value in zip(trainer.model.parameters(), before, strict=True):
            parameter.copy_(value)
    loss, gradients, (student, teacher), weights = oracle(trainer, batch)
    assert set(batch.rollout.weights.unique().tolist()) > {0.25, 3.0}
    torch.testing.assert_close(batch.rollout.weights.double(), weights)
    for was, now, gradient in zip(before, after, gradients, strict=True):
        torch.testing.assert_close(was - now, gradient.float(), rtol=1e-4, atol=2e-6)
    (logged,) = (row for row in trainer.state.log_history if "loss" in row)
    expected = {"loss": loss, "divergence/mean": loss, "entropy/student": student, "entropy/teacher": teacher}
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_weights_apply_in_evaluation(make_trainer):
    trainer = make_trainer(Weighing, beta=0.0, eval_dataset=tiny.rows(4), per_device_eval_batch_size=4)
    batches = scored(trainer)
    measured = trainer.evaluate()["eval_loss"]
    assert measured == pytest.approx(oracle(trainer, batches[0])[0], rel=1e-5)
