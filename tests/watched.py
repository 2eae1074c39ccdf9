"""A run in which everything that draws or remembers is switched on, and a witness of what it does, step by step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from trl_opsd import OPSDTrainer

EPOCHS = 3


@dataclass
class Witness(TrainerCallback):
    """Writes down what a process does: prompts with completions, losses, and a hash of its weights after each step."""

    written: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        digest = hashlib.sha256()
        for tensor in [*model.parameters(), *model.buffers()]:
            digest.update(_own_share(tensor).detach().contiguous().numpy().tobytes())
        self.weights.append(digest.hexdigest())


def _own_share(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of it, where ZeRO-3 or FSDP2 has split it."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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


def saved_models(folder: Path) -> tuple[str, str]:
    """Student and teacher as paths. A model that is built while a config of ZeRO-3 is alive would be split."""
    tiny.qwen2(32, seed=0).save_pretrained(folder / "student")
    tiny.qwen2(48, seed=1).save_pretrained(folder / "teacher")
    return str(folder / "student"), str(folder / "teacher")


def trainer(folder: Path, variant: str, models: tuple[Any, Any] | None = None, **options: Any) -> Watched:
    """Eighteen rows, of which an epoch leaves out two; two micro-steps of two rows; everything that draws is on.

    The full student learns from a wider teacher and is evaluated in between; the adapter has dropout and is its own
    teacher, as a moving average unless the options say otherwise. `models` are student and teacher.
    """
    of_variant: dict[str, Any] = {"teacher_model_kind": "ema"}
    if variant == "full":
        of_variant = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
    given = {"max_steps": -1, "num_train_epochs": EPOCHS, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    given |= {"max_completion_length": 6, **of_variant, **options}
    if given.get("teacher_model_kind") == "ema":
        given["teacher_update_rate"] = 0.5
    train_dataset = given.pop("train_dataset", rows(18))
    student, teacher = models or (tiny.qwen2(32, seed=0), tiny.qwen2(48, seed=1))
    made = Watched(
        model=student,
        teacher_model=teacher if variant == "full" else None,
        args=tiny.config(folder, **given),
        train_dataset=train_dataset,
        eval_dataset=rows(2),
        processing_class=tiny.tokenizer(),
        peft_config=None if variant == "full" else LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
    )
    made.witness = Witness()
    made.add_callback(made.witness)
    return made
