"""Equivalent runs: how a batch is split, padded or tiled must not change what is learned."""

from __future__ import annotations

import pytest
import torch
from support import tiny

from trl_opsd import FixedRollout, OPSDTrainer


def weights(trainer: OPSDTrainer) -> torch.Tensor:
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Within a tenth of a step of AdamW at lr 1e-4."""
    assert (one - other).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> torch.Tensor:
    """The weights after a run with the usual options."""
    words = tiny.tokenizer()
    trainer = OPSDTrainer(
        model=tiny.qwen2(32, seed=0),
        teacher_model=tiny.qwen2(48, seed=1),
        args=tiny.config(tmp_path_factory.mktemp("expected")),
        train_dataset=tiny.rows(),
        processing_class=words,
        rollout=FixedRollout(tiny.recorded(words)),
    )
    return weights(trainer)


@pytest.mark.quick
def test_training_moves_the_weights_by_more_than_the_tolerance(expected):
    before = torch.cat([parameter.detach().flatten() for parameter in tiny.qwen2(32, seed=0).parameters()])
    assert (expected - before).abs().max() > 1e-4


@pytest.mark.parametrize(
    "make_model",
    [tiny.qwen2, tiny.gpt2, *(pytest.param(one, marks=pytest.mark.long) for one in (tiny.llama, tiny.gemma2))],
)
def test_the_amount_of_padding_changes_nothing(make_trainer, make_model):
    short, long = (
        weights(make_trainer(model=make_model(32, 0), teacher_model=make_model(48, 1), pad_to_multiple_of=multiple))
        for multiple in (None, 64)
    )
    assert_same(short, long)


@pytest.mark.quick
def test_end_token_that_is_the_padding_stays_in_loss(make_trainer):
    words = tiny.tokenizer()
    words.pad_token = words.eos_token
    apart, same = make_trainer(), make_trainer(processing_class=words)
    assert_same(weights(apart), weights(same))
    assert [entry.get("num_tokens") for entry in apart.state.log_history] == [
        entry.get("num_tokens") for entry in same.state.log_history
    ]


def test_gradient_checkpointing_changes_nothing(make_trainer, expected):
    assert_same(weights(make_trainer(gradient_checkpointing=True)), expected)
