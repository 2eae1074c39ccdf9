"""What may be assigned once a trainer is built, as in TRL, what is final, and which names of a subclass are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny
from support.parity import TOLERANCE, Replaying, made
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer
from trl_opsd.loop.overrides import _OF_BATCHES
from trl_opsd.losses import ForwardKL, GeneralizedJSD, ReverseKL


def loss_of(trainer: Any) -> float:
    score = trainer.score if isinstance(trainer, OPSDTrainer) else trainer._generate_and_score_completions
    batch = score([{"prompt": prompt} for prompt in tiny.PROMPTS[:2]])
    return trainer.compute_loss(trainer.model, batch).item()


def pair(tmp_path, theirs: Any = Replaying, rollout: Any = None, **options):
    """TRL's trainer and ours, alike."""
    given = tiny.options(tmp_path, **options)
    mine = {} if rollout is None else {"rollout": rollout}
    return made(theirs, DistillationConfig(**given)), made(OPSDTrainer, OPSDConfig(**given), **mine)


@pytest.mark.parametrize(("name", "value"), [("beta", 1.0), ("beta", 0.3), ("temperature", 2.0)])
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
def test_rollouts_follow_an_assigned_generation_config_as_in_trl(tmp_path, change):
    theirs, ours = pair(tmp_path, DistillationTrainer, HFRollout())
    before = completions(ours)
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


@pytest.mark.quick
@pytest.mark.parametrize("name", ["teacher_model", "train_dataset", "eval_dataset"])
def test_what_a_trainer_was_built_with_is_final(make_trainer, name):
    trainer = make_trainer()
    before = getattr(trainer, name)
    with pytest.raises(AttributeError, match=f"`trainer.{name}` is read when the trainer is built, and is final"):
        setattr(trainer, name, tiny.rows(2))
    setattr(trainer, name, before)
    assert getattr(trainer, name) is before


def losses(trainer: OPSDTrainer) -> list[float]:
    trainer.train()
    return tiny.logged(trainer, "loss")


def test_assigned_rollout_generates_with_this_student(make_trainer):
    short = {"max_completion_length": 8, "max_steps": 2}
    expected = losses(make_trainer(rollout=HFRollout(), **short))
    trainer = make_trainer(**short)
    trainer.rollout = HFRollout()
    assert losses(trainer) == expected
    with pytest.raises(AttributeError, match="no attribute 'bind'"):
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


# ---- Names of a subclass and of the log ------------------------------------------------------------------------------


@pytest.mark.before_loading
@pytest.mark.parametrize("name", _OF_BATCHES)
def test_overrides_of_what_makes_a_batch_are_refused_before_loading(make_trainer, name):
    assert name in vars(DistillationTrainer), "else nothing would be refused"
    mine = type("Mine", (OPSDTrainer,), {name: lambda self, *given: None})
    with pytest.raises(TypeError, match=f"`Mine.{name}` makes batches in TRL, not here: override one of complete, "):
        make_trainer(mine)


@pytest.mark.parametrize("name", ["loss", "divergence/mean", "learning_rate", "time/complete"])
def test_recording_under_a_taken_name_is_refused(make_trainer, name):
    with pytest.raises(ValueError, match=f"`record\\('{name}', ...\\)`: this name is already used in the log"):
        make_trainer().record(name, 1.0)


def test_a_misspelt_verb_is_refused(make_trainer):
    class Misspelt(OPSDTrainer):
        def wiegh(self, rollout, rows, targets):
            return rollout.weights

        def complete_with_hints(self):
            """A helper."""

    with pytest.raises(TypeError, match=r"^`Misspelt.wiegh` is never called; did you mean `weigh`"):
        make_trainer(Misspelt)
