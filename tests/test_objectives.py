"""Options that shape the objective reach the loss, and change nothing else."""

from __future__ import annotations

import pytest
import tiny
import torch

from trl_opsd.losses import DIVERGENCES, ForwardKL, LazyLogits, OutputHead, dense_divergence


def expected(trainer, divergence, temperatures=(1.0, 1.0), kl_clip=None):
    """The mean divergence over all tokens of the rows, by the models' own logits, in float64."""
    words, values = tiny.tokenizer(), []
    for prompt, completion in tiny.recorded(words).items():
        if list(prompt) not in [words(row["prompt"])["input_ids"] for row in trainer.eval_dataset]:
            continue
        ids = torch.tensor([[*prompt, *completion]])
        sides = []
        for model, temperature in zip((trainer.model, trainer.teacher_model), temperatures, strict=True):
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            sides.append(LazyLogits(logits, OutputHead(torch.eye(logits.size(-1))), temperature))
        values.append(dense_divergence(*sides, divergence, kl_clip=kl_clip).divergence)
    return torch.cat(values).mean().item()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_named_divergence_is_what_is_minimised(make_trainer, name):
    trainer = make_trainer(divergence=name, eval_dataset=tiny.rows())
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected(trainer, trainer.divergence), rel=1e-4)
    assert "eval_divergence/clipped" not in found


def test_a_clip_reaches_the_loss_and_is_counted(make_trainer):
    trainer = make_trainer(divergence="forward_kl", kl_clip=0.01, eval_dataset=tiny.rows())
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(expected(trainer, ForwardKL(), kl_clip=0.01), rel=1e-4)
    assert 0 < found["eval_divergence/clipped"] <= 1


@pytest.mark.parametrize(
    ("options", "temperatures"),
    [
        ({"temperature": 0.7}, (0.7, 0.7)),
        ({"temperature": 0.7, "student_temperature": 1.4}, (1.4, 0.7)),
        ({"temperature": 0.7, "teacher_temperature": 2.0}, (0.7, 2.0)),
        ({"student_temperature": 0.5, "teacher_temperature": 2.0}, (0.5, 2.0)),
    ],
)
def test_each_model_has_its_own_temperature_in_the_loss(make_trainer, options, temperatures):
    trainer = make_trainer(divergence="forward_kl", eval_dataset=tiny.rows(), **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected(trainer, ForwardKL(), temperatures), rel=1e-4)
    assert trainer.generation_config.temperature == options.get("temperature", 1.0)


def test_a_discount_weighs_the_tokens_of_a_training_by_their_place(make_trainer):
    trainer = make_trainer(position_discount=0.5, max_steps=1, eval_dataset=tiny.rows())
    seen, weigh = [], trainer.weigh
    trainer.weigh = lambda *given: seen.append((given[0].weights, weigh(*given))) or seen[-1][1]
    trainer.train()
    ((plain, weights),) = seen
    assert plain.size(1) > 2
    torch.testing.assert_close(weights, plain * torch.tensor([0.5**place for place in range(plain.size(1))]))
    found = trainer.evaluate()
    assert torch.equal(*seen[-1])
    assert found["eval_loss"] == pytest.approx(expected(trainer, trainer.divergence), rel=1e-4)
