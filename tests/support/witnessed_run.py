"""A run with every source of randomness and state switched on, and a witness that records each step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from support import fsdp_on_cpu, tiny
from transformers import TrainerCallback

from trl_opsd import OPSDTrainer

EPOCHS = 3


@dataclass
class Witness(TrainerCallback):
    """Records what a process does: prompts with completions, losses, and a hash of its weights after each step."""

    written: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        digest = hashlib.sha256()
        for tensor in [*model.parameters(), *model.buffers()]:
            digest.update(_local_shard(tensor).detach().contiguous().numpy().tobytes())
        self.weights.append(digest.hexdigest())


def _local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds under ZeRO-3 or FSDP2; else all of it."""
    if hasattr(tensor, "ds_tensor"):
        return tensor.ds_tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Watched(OPSDTrainer):
    """Records completions and losses in its witness."""

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
    """Distinct prompts, so that a different order shows."""
    return Dataset.from_dict(
        {"prompt": [f"{i}+{i}=" for i in range(number)], "privileged_context": [f"{2 * i}" for i in range(number)]}
    )


def saved_models(folder: Path) -> tuple[str, str]:
    """Saves student and teacher and returns their paths; built while a ZeRO-3 config is alive, they would be split."""
    tiny.qwen2(32, seed=0).save_pretrained(folder / "student")
    tiny.qwen2(48, seed=1).save_pretrained(folder / "teacher")
    return str(folder / "student"), str(folder / "teacher")


def trainer(folder: Path, variant: str, models: tuple[Any, Any] | None = None, **options: Any) -> Watched:
    """Eighteen rows, two of which each epoch drops; two micro-steps of two rows; every source of randomness is on.

    The full student learns from a wider teacher and is evaluated in between; the adapter has dropout and is its own
    teacher as a moving average. `models` are student and teacher.
    """
    of_variant: dict[str, Any] = {"teacher_model_kind": "ema", "teacher_update_rate": 0.5}
    if variant == "full":
        of_variant = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
    given = {"max_steps": -1, "num_train_epochs": EPOCHS, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    given |= {"max_completion_length": 6, **of_variant, **options}
    train_dataset = given.pop("train_dataset", rows(18))
    student, teacher = models or (tiny.qwen2(32, seed=0), tiny.qwen2(48, seed=1))
    args = tiny.config(folder, **given)
    fsdp_on_cpu.allow()
    made = Watched(
        model=student,
        teacher_model=teacher if variant == "full" else None,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=rows(2),
        processing_class=tiny.tokenizer(),
        peft_config=None if variant == "full" else LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
    )
    made.witness = Witness()
    made.add_callback(made.witness)
    return made
