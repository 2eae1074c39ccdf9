"""A step that learns from rows while others are written learns what a step does that waits for all of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import tiny
import torch
from apart import Apart
from datasets import Dataset
from peft import LoraConfig
from test_dealing import ragged

from trl_opsd import OPSDTrainer

STEPS = 3
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "seed": 3}


def recorded(rows: int = 8 * STEPS, empty: int = 2) -> tuple[Dataset, dict[tuple[int, ...], list[int]]]:
    """Rows of unequal lengths, and a completion of each, a few of them empty."""
    dataset, rollout = ragged(rows)
    answers = {prompt: list(ids) for prompt, ids in rollout._completions.items()}
    for prompt in list(answers)[:empty]:
        answers[prompt] = []
    return dataset.add_column("privileged_context", [f"hint {row}" for row in range(rows)]), answers


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
    "an adapter, packed": {**LORA, "padding_free": True},
    "weights by row, clipped": {"cls": ByLength, "max_grad_norm": 1e-3},
    "several teachers, a budget": {
        "teacher_model": "two",
        "max_tokens_per_microbatch": 200,
        "pad_to_multiple_of": 16,
    },
    "own average, packed to a budget, one call": {
        "teacher_model": None,
        "teacher_model_kind": "ema",
        "padding_free": True,
        "max_tokens_per_microbatch": 150,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
    },
    "one micro-batch": {"max_tokens_per_microbatch": 100_000, "deterministic": True},
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
        for name in {"loss", "grad_norm", "divergence/mean", "entropy/student", "entropy/teacher"} & set(other):
            assert entry[name] == pytest.approx(other[name], rel=1e-5), name
        for name in other:
            if name.startswith(("completions/", "num_tokens", "epoch", "learning_rate")):
                assert entry[name] == other[name], name
        assert set(other) <= set(entry)


class Listening(Watched):
    """Notes the passes of the student among the events of its rollout: rows, and the denominator of the loss."""

    def compare(self, student, rollout, targets, num_items):
        self.rollout.events.append(("learns", len(rollout.completion_ids), float(num_items)))
        return super().compare(student, rollout, targets, num_items)


def test_rows_are_learned_before_the_last_is_written(make_trainer):
    def before(number):
        if number == 7:
            until = time.monotonic() + 30
            while [event[0] for event in rollout.events].count("learns") < 2 and time.monotonic() < until:
                time.sleep(0.01)

    dataset, answers = recorded()
    rollout = Apart(answers, before=before)
    trainer = make_trainer(
        Listening,
        train_dataset=dataset,
        rollout=rollout,
        max_completion_length=120,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=1,
        logging_steps=1,
        overlap="step",
    )
    trainer.train()
    events = [event for event in rollout.events if isinstance(event, tuple)]
    assert [event[0] for event in events].index("learns") < 8, "nothing was learned before the last row came"
    learned = [event[1:] for event in events if event[0] == "learns"]
    assert learned == [(2, 1024.0)] * 4, "2 ** round(log2(8 rows x 120 tokens))"
    first, last, end = (
        trainer.state.log_history[0][f"overlap/{name}"] for name in ("first_backward", "last_row", "end")
    )
    assert 0 < first < last < end


def test_in_the_order_of_rows_it_is_the_same_bit_for_bit(make_trainer):
    options = {"overlap": "step", "max_tokens_per_microbatch": 200}
    found = {
        deterministic: [trained(make_trainer, order=order, deterministic=deterministic, **options) for order in (0, 10)]
        for deterministic in (True, False)
    }
    equal = {
        deterministic: all(
            torch.equal(*pair) for pair in zip(*(one.model.parameters() for one in trainers), strict=True)
        )
        for deterministic, trainers in found.items()
    }
    assert equal == {True: True, False: False}
    orders = [[event[1] for event in one.rollout.events if event[0] == "row"] for one in found[True]]
    assert orders[0] != orders[1]
