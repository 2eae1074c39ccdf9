"""A run that was interrupted after any of its steps goes on as if it had not been: not close, bit for bit."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from trl_opsd import OPSDTrainer

EPOCHS, STEPS = 3, 4
EVERY_STEP = range(1, EPOCHS * STEPS + 1)
VARIANTS = ("full", "lora")


@dataclass
class Witness(TrainerCallback):
    """Writes down what a run does: prompts with completions, losses, and a hash of all weights after each step."""

    written: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        digest = hashlib.sha256()
        for tensor in model.state_dict().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        self.weights.append(digest.hexdigest())


class Watched(OPSDTrainer):
    """Shows a witness what only passes through."""

    witness = Witness()

    def complete(self, prompt_ids):
        completions = super().complete(prompt_ids)
        if self.model.training:
            self.witness.written.append((prompt_ids, completions))
        return completions

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.witness.losses.append(loss.item())
        return loss


def rows(number: int) -> Dataset:
    """Every prompt is another one, so that another order shows."""
    return Dataset.from_dict(
        {"prompt": [f"{i}+{i}=" for i in range(number)], "privileged_context": [f"{2 * i}" for i in range(number)]}
    )


def trainer(folder: Path, variant: str, **options: Any) -> Watched:
    """Eighteen rows, of which an epoch leaves out two; two micro-steps of two rows; everything that draws is on.

    The full student learns from a wider teacher and is evaluated in between; the adapter has dropout and is its own
    teacher as a moving average.
    """
    of_variant: dict[str, Any] = {"teacher_model_kind": "ema", "teacher_update_rate": 0.5}
    if variant == "full":
        of_variant = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
    given = {"max_steps": -1, "num_train_epochs": EPOCHS, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    given |= {"max_completion_length": 6, **of_variant, **options}
    train_dataset = given.pop("train_dataset", rows(18))
    made = Watched(
        model=tiny.qwen2(32, seed=0),
        teacher_model=tiny.qwen2(48, seed=1) if variant == "full" else None,
        args=tiny.config(folder, **given),
        train_dataset=train_dataset,
        eval_dataset=rows(2),
        processing_class=tiny.tokenizer(),
        peft_config=None if variant == "full" else LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
    )
    made.witness = Witness()
    made.add_callback(made.witness)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Witness]]:
    """Uninterrupted runs, with a checkpoint after each step."""
    runs = {}
    for variant in VARIANTS:
        folder = tmp_path_factory.mktemp(variant)
        run = trainer(folder, variant, save_strategy="steps", save_steps=1)
        run.train()
        runs[variant] = (folder, run.witness)
    return runs


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_epochs_of_a_run_are_three_different_orders_of_all_prompts(whole, variant):
    _, run = whole[variant]
    batches = [run.written[epoch * STEPS : (epoch + 1) * STEPS] for epoch in range(EPOCHS)]
    orders = [[tuple(ids) for prompts, _ in epoch for ids in prompts] for epoch in batches]
    assert len({tuple(order) for order in orders}) == EPOCHS
    assert all(len(set(order)) == 4 * STEPS for order in orders)
    assert len(set(run.weights)) == len(run.weights) == EPOCHS * STEPS


@pytest.mark.parametrize("step", EVERY_STEP)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_has_the_prompts_completions_losses_and_weights_of_an_uninterrupted_one(
    whole, tmp_path, variant, step
):
    folder, run = whole[variant]
    torch.manual_seed(12345)  # whatever this process drew before may not matter
    resumed = trainer(tmp_path, variant)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.witness.written == run.written[step:]
    assert resumed.witness.losses == run.losses[2 * step :]
    assert resumed.witness.weights == run.weights[step:]


def test_a_stream_resumes_exactly_in_its_first_pass_and_says_so_when_it_does_not(tmp_path, caplog):
    options = {"max_steps": 4, "eval_strategy": "no", "train_dataset": rows(10).to_iterable_dataset()}  # two a pass
    run = trainer(tmp_path / "whole", "full", save_strategy="steps", save_steps=1, **options)
    run.train()
    for step in (1, 3):
        caplog.clear()
        resumed = trainer(tmp_path / "resumed", "full", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        exact = resumed.witness.weights == run.witness.weights[step:]
        assert exact == (step == 1)
        assert ("does not read on at the same row" in caplog.text) == (not exact)
