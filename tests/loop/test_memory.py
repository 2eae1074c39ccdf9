"""An out-of-memory error names the phase."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny, vision_language

from trl_opsd import FixedRollout
from trl_opsd.models.weights import cached_per_token

ABSURD = 2**60


def allocate(*_: Any, **__: Any) -> Any:
    """A real failure of torch's allocator."""
    return torch.empty(ABSURD)


class Greedy(FixedRollout):
    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        return allocate()


def break_in(trainer: Any, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one phase run out of memory in a call it makes."""
    if phase == "complete":
        trainer.rollout = Greedy({})
    elif phase == "teach":
        trainer.teacher.model.model.register_forward_hook(allocate)
    elif phase == "compare":
        trainer.model.model.register_forward_hook(allocate)
    elif phase == "step":
        monkeypatch.setattr(torch.optim.AdamW, "step", allocate)
    else:
        monkeypatch.setattr(torch, "save", allocate)


@pytest.mark.parametrize("phase", ["complete", "teach", "compare", "step", "save"])
def test_an_out_of_memory_error_names_its_phase(make_trainer, monkeypatch, phase):
    trainer = make_trainer(
        save_strategy="steps", save_steps=1, gradient_accumulation_steps=2, max_completion_length=24,
        optim="adamw_torch", loss_chunk_tokens=100,
    )  # fmt: skip
    break_in(trainer, phase, monkeypatch)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as raised:
        trainer.train()
    [note] = [line for line in raised.value.__notes__ if line.startswith("Out of memory")]
    assert note.startswith(f"Out of memory in phase '{phase}'")


def test_a_reward_model_that_runs_out_of_memory_is_explained(make_trainer):
    trainer = make_trainer(
        reward_funcs=allocate_for_rewards, eval_dataset=tiny.rows(4), reward_weight=0.1, num_generations=2
    )
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        trainer.train()
    assert any(line.startswith("Out of memory in phase 'reward'") for line in raised.value.__notes__)


def allocate_for_rewards(completions, **_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_the_cache_of_a_model_whose_layers_differ_is_estimated(family):
    config = vision_language.model(family, 32, 0).config
    text = config.get_text_config()
    each = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)]
    heads = [getattr(one, "num_key_value_heads", None) or one.num_attention_heads for one in each]
    assert cached_per_token(config) == sum(2 * n * one.head_dim for n, one in zip(heads, each, strict=True)) > 0


def test_other_errors_get_no_note_on_memory(make_trainer):
    trainer = make_trainer()
    for error in (RuntimeError("boom"), ValueError("boom"), OSError("boom")):
        trainer.explain_memory(error, "teach")
        assert not hasattr(error, "__notes__")
