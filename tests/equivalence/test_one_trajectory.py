"""Equivalent runs: how rows are padded and activations kept must not change what is learned."""

from __future__ import annotations

import pytest
from support import tiny


def assert_same(one, other):
    """Within a tenth of a step of AdamW at lr 1e-4."""
    assert (tiny.weights(one) - tiny.weights(other)).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def usual(make_shared):
    """A run with the usual options, which moves the weights by more than the tolerance."""
    trainer = make_shared()
    before = tiny.weights(trainer)
    trainer.train()
    assert (tiny.weights(trainer) - before).abs().max() > 1e-4
    return trainer


@pytest.mark.quick
def test_end_token_that_is_the_padding_stays_in_loss(trained, usual):
    words = tiny.tokenizer()
    words.pad_token = words.eos_token
    same = trained(processing_class=words)
    assert_same(same, usual)
    assert tiny.logged(same, "num_tokens") == tiny.logged(usual, "num_tokens")


@pytest.mark.parametrize("options", [{"pad_to_multiple_of": 64}, {"gradient_checkpointing": True}], ids=str)
def test_padding_and_checkpointing_change_nothing(trained, usual, options):
    assert_same(trained(**options), usual)


def test_learned_positions_count_no_padding(trained):
    runs = [
        trained(model=tiny.gpt2(32), teacher_model=tiny.gpt2(48, 1), pad_to_multiple_of=multiple)
        for multiple in (None, 64)
    ]
    assert_same(*runs)
