"""Public attributes of TRL's trainer that can be assigned to once the trainer is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny
from support.parity import TOLERANCE, Replaying
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer
from trl_opsd.losses import ForwardKL, GeneralizedJSD, ReverseKL


def loss_of(trainer: Any) -> float:
    score = trainer.score if isinstance(trainer, OPSDTrainer) else trainer._generate_and_score_completions
    batch = score([{"prompt": prompt} for prompt in tiny.PROMPTS[:2]])
    return trainer.compute_loss(trainer.model, batch).item()


def pair(tmp_path, **options):
    """TRL's trainer and ours, alike."""
    for cls, config in ((Replaying, DistillationConfig), (OPSDTrainer, OPSDConfig)):
        rollout = {"rollout": FixedRollout(tiny.recorded(tiny.tokenizer()))} if cls is OPSDTrainer else {}
        yield cls(
            model=tiny.qwen2(32, seed=0),
            teacher_model=tiny.qwen2(48, seed=1),
            args=config(**tiny.options(tmp_path, **options)),
            train_dataset=tiny.rows(),
            processing_class=tiny.tokenizer(),
            **rollout,
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("beta", 1.0), ("beta", 0.3), ("temperature", 2.0)],
)
def test_the_loss_follows_an_assignment_as_in_trl(tmp_path, name, value):
    losses, before = [], []
    for trainer in pair(tmp_path, beta=0.0):
        before.append(loss_of(trainer))
        setattr(trainer, name, value)
        losses.append(loss_of(trainer))
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)
    assert before[1] == pytest.approx(before[0], abs=TOLERANCE) != pytest.approx(losses[1], rel=1e-2)


@pytest.mark.quick
def test_beta_is_the_number_of_the_divergence(make_trainer):
    trainer = make_trainer(beta=0.3)
    assert (trainer.beta, trainer.divergence) == (0.3, GeneralizedJSD(beta=0.3))
    for beta, divergence in ((0.0, ForwardKL()), (1.0, ReverseKL()), (0.5, GeneralizedJSD(beta=0.5))):
        trainer.beta = beta
        assert (trainer.beta, trainer.divergence) == (beta, divergence)
    trainer.divergence = ForwardKL()
    assert trainer.beta == 0.0
    for value in (2, "reverse_kl"):
        with pytest.raises(ValueError, match=f"^`beta={value!r}`: expected "):
            trainer.beta = value
    assert trainer.beta == 0.0


def completions(trainer: Any) -> list[list[int]]:
    torch.manual_seed(0)
    prompts = tiny.tokenizer()(tiny.PROMPTS)["input_ids"]
    if isinstance(trainer, OPSDTrainer):
        return trainer.complete(prompts)
    return [list(ids) for ids in trainer._generate_single_turn(prompts, None, {})]


@pytest.mark.parametrize("change", [{"temperature": 0.1}, {"do_sample": False}, {"top_k": 1}, {"max_new_tokens": 5}])
def test_rollouts_follow_an_assigned_generation_config_as_in_trl(make_trainer, tmp_path, change):
    ours = make_trainer(rollout=HFRollout())
    before = completions(ours)
    theirs = DistillationTrainer(
        model=tiny.qwen2(32, seed=0),
        teacher_model=tiny.qwen2(48, seed=1),
        args=DistillationConfig(**tiny.options(tmp_path)),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
    )
    for name, value in change.items():
        setattr(ours.generation_config, name, value)
        setattr(theirs.generation_config, name, value)
    assert completions(ours) == completions(theirs) != before


@pytest.mark.parametrize("late", ["pad_to_multiple_of", "shuffle_dataset"])
def test_attributes_read_for_each_batch_can_be_assigned(make_trainer, late):
    value = {"pad_to_multiple_of": 64, "shuffle_dataset": False}[late]
    trainer, built = make_trainer(max_steps=1), make_trainer(max_steps=1, **{late: value})
    setattr(trainer, late, value)
    for one in (trainer, built):
        one.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(built.state.log_history[0]["loss"], abs=TOLERANCE)
    if late == "pad_to_multiple_of":
        assert trainer.score([{"prompt": "a"}]).rollout.prompt_ids.shape == (1, 64)
