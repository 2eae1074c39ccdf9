"""Teachers and datasets are final once the trainer is built; names of one's own are free."""

from __future__ import annotations

import pytest
import torch
from support import tiny

from trl_opsd import HFRollout, OPSDTrainer


@pytest.mark.quick
@pytest.mark.parametrize("name", ["teacher_model", "train_dataset", "eval_dataset"])
def test_what_a_trainer_was_built_with_is_final(make_trainer, name):
    trainer = make_trainer()
    before = getattr(trainer, name)
    with pytest.raises(AttributeError, match=f"`trainer.{name}` is read when the trainer is built, and is final"):
        setattr(trainer, name, tiny.rows(2))
    setattr(trainer, name, before)
    assert getattr(trainer, name) is before


# ---- What writes ----------------------------------------------------------------------------------------------------


def losses(trainer: OPSDTrainer) -> list[float]:
    trainer.train()
    return tiny.logged(trainer, "loss")


def test_assigned_rollout_generates_with_this_student(make_trainer):
    short = {"max_completion_length": 8, "max_steps": 2}
    expected = losses(make_trainer(rollout=HFRollout(), **short))
    trainer = make_trainer(**short)
    trainer.rollout = HFRollout()
    assert losses(trainer) == expected
    with pytest.raises(TypeError, match=r"expected a `trl_opsd\.RolloutBackend`"):
        trainer.rollout = "vllm"


def test_trainers_that_share_a_rollout_use_their_own_students(make_trainer):
    short = {"max_completion_length": 8, "max_steps": 1}
    expected = losses(make_trainer(rollout=HFRollout(), **short))
    shared = HFRollout()
    first = make_trainer(rollout=shared, **short)
    other = make_trainer(rollout=shared, model=tiny.qwen2(32, seed=7))
    torch.manual_seed(42)
    assert losses(first) == expected
    assert other.rollout is first.rollout is shared
