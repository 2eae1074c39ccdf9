"""A step that learns from rows while others are written learns what a step does that waits for all of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny
import torch
from apart import Apart
from datasets import Dataset
from peft import LoraConfig
from test_dealing import ragged

from trl_opsd import OPSDTrainer
from trl_opsd.losses import ForwardKL

STEPS = 3
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "seed": 3}


def recorded(rows: int = 8 * STEPS, empty: int = 2) -> tuple[Dataset, dict[tuple[int, ...], list[int]]]:
    """Rows of unequal lengths, and a completion of each, a few of them empty."""
    dataset, rollout = ragged(rows)
    answers = {prompt: list(ids) for prompt, ids in rollout._completions.items()}
    for prompt in list(answers)[:empty]:
        answers[prompt] = []
    return dataset, answers


class Watched(OPSDTrainer):
    """Keeps what is known before each step: its gradient, and what it divides by."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        self.gradients = getattr(self, "gradients", [])
        self.gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        return super()._get_grad_norm(model, grad_norm)


class ByLength(Watched):
    """Weighs a token by the length of its row."""

    def weigh(self, rollout, rows, targets):
        return rollout.weights * rollout.weights.sum(1, keepdim=True) / 7


def trained(make_trainer, cls=Watched, order=0, **options):
    dataset, answers = recorded()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": STEPS, **options}
    if isinstance(options.get("teacher_model"), dict):
        dataset = dataset.add_column("teacher", ["one", "two", "two"] * (len(dataset) // 3))
    trainer = make_trainer(
        cls,
        train_dataset=dataset,
        rollout=Apart(answers, order),
        max_completion_length=120,
        logging_steps=1,
        shuffle_dataset=False,
        **options,
    )
    trainer.train()
    return trainer


def relative(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number."""
    flat = [torch.cat([tensor.detach().flatten().double() for tensor in tensors]) for tensors in (mine, theirs)]
    return float((flat[0] - flat[1]).abs().max() / flat[1].abs().max())


WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": LORA,
    "weights by row": {"cls": ByLength},
    "one call": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "clipped": {"max_grad_norm": 1e-3},
    "a budget": {"max_tokens_per_microbatch": 150},
    "a budget for all": {"max_tokens_per_microbatch": 100_000},
    "packed": {"padding_free": True},
    "packed to a budget": {"padding_free": True, "max_tokens_per_microbatch": 150},
    "padded to a multiple": {"pad_to_multiple_of": 16, "max_tokens_per_microbatch": 200},
    "several teachers": {"teacher_model": "two"},
    "own average": {"teacher_model": None, "teacher_model_kind": "ema"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_a_step_that_waits(make_trainer, way):
    def options():
        found = dict(WAYS[way])
        if found.get("teacher_model") == "two":
            found["teacher_model"] = {"one": tiny.qwen2(48, 1), "two": tiny.qwen2(40, 2)}
        return found

    waits = trained(make_trainer, **options())
    overlaps = trained(make_trainer, overlap="step", **options())
    first = [relative(mine[0], theirs[0]) for mine, theirs in [(overlaps.gradients, waits.gradients)]]
    weights = relative(list(overlaps.model.parameters()), list(waits.model.parameters()))
    print(f"{way}: gradient {first[0]:.1e}, weights {weights:.1e}")
    assert first[0] <= 1e-6
    assert weights <= 1e-6
    assert overlaps.rollout.events.count("ended") == STEPS
    mine, theirs = overlaps.state.log_history, waits.state.log_history
    assert len(mine) == len(theirs)
    for entry, other in zip(mine, theirs, strict=True):
        for name in ("loss", "grad_norm", "divergence/mean", "entropy/student", "entropy/teacher"):
            assert entry.get(name) == pytest.approx(other.get(name), rel=1e-4), name
        for name in other:
            if name.startswith(("completions/", "num_tokens", "epoch", "learning_rate")):
                assert entry[name] == other[name], name
        assert {name for name in other if "time" not in name} <= set(entry)
