"""Checkpoints that are missing, damaged, or of another run; none of them is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from support import tiny

from trl_opsd import OPSDTrainer
from trl_opsd.checkpoints import MANIFEST
from trl_opsd.loop.fingerprint import FILE

pytestmark = pytest.mark.refusal


@pytest.fixture
def checkpoint(trained: Callable[..., OPSDTrainer], tmp_path: Path) -> Path:
    """After the first step of a run with the default options of `make_trainer`."""
    trained(save_strategy="steps", save_steps=1, max_steps=1)
    return tmp_path / "checkpoint-1"


@pytest.mark.parametrize(
    ("asked", "named"),
    [(True, "no complete checkpoint"), ("True", "no complete checkpoint"), ("no/checkpoint-7", "no/checkpoint-7")],
)
def test_a_checkpoint_that_is_not_there_is_refused(refuses, asked, named):
    refuses(named, {}, resume=asked)


@pytest.mark.parametrize("what", ["optimizer.pt", MANIFEST])
def test_a_torn_checkpoint_is_refused(refuses, checkpoint, what):
    if what == MANIFEST:
        os.truncate(checkpoint / MANIFEST, 40)
    else:
        (checkpoint / what).unlink()
    refuses(f"checkpoint-1 is not complete: {what}", {}, resume=str(checkpoint))


CHANGES: dict[str, dict[str, Any]] = {
    "divergence": {"beta": 0.3},
    "divergence ": {"divergence": "forward_kl"},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "generation_kwargs": {"generation_kwargs": {"min_new_tokens": 2}},
    "max_completion_length": {"max_completion_length": 20},
    "per_device_train_batch_size": {"per_device_train_batch_size": 1},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "seed": {"seed": 1},
    "shuffle_dataset": {"shuffle_dataset": False},
    "train_dataset": {"train_dataset": tiny.rows(7)},
    "teacher_prompt_template": {"teacher_prompt_template": "{privileged_context} {prompt}"},
    "teachers": {"teacher_model": tiny.qwen2(64, seed=1)},
}
"""Changes of a run, by the one entry of the fingerprint in which they show."""
ONLY = r"differs from the one that saved .*:\n  {}: .*\nRestore"


@pytest.mark.parametrize("name", CHANGES)
def test_another_run_is_refused_by_the_only_difference(refuses, checkpoint, name):
    refuses(ONLY.format(name.strip()), CHANGES[name], resume=str(checkpoint))


def test_another_run_is_refused_in_whatever_way_it_is_asked_for(refuses, make_trainer, checkpoint):
    refuses("seed: 42", {"seed": 1}, resume=True)
    trainer = make_trainer()
    trainer.divergence = "forward_kl"
    with pytest.raises(ValueError, match="divergence"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    said = json.loads((checkpoint / FILE).read_text())
    (checkpoint / FILE).write_text(json.dumps({**said, "world_size": 2}))
    (checkpoint / MANIFEST).unlink()  # else the manifest reveals the change
    refuses("world_size: 2", {}, resume=str(checkpoint))


def final(folder: Path, seed: int, width: int) -> str:
    """The path of a saved model; the folder is always named `final`."""
    tiny.qwen2(width, seed).save_pretrained(folder / f"{seed}" / "final")
    return str(folder / f"{seed}" / "final")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("student", {"student": 2}),
        ("teacher_weights", {"teacher": 3}),
        ("adapter: {'lora_alpha': 8}", {"lora_alpha": 16}),
        ("adapter: {'r': 4}", {"r": 8}),
        ("optimizer", {"optim": "sgd"}),
    ],
)
def test_another_student_with_an_adapter_is_refused(refuses, trained, tmp_path, name, changed):
    def given(student: int = 0, teacher: int = 1, optim: str = "adamw_torch", **lora: Any) -> dict[str, Any]:
        return {
            "model": final(tmp_path, student, 32),
            "teacher_model": final(tmp_path, teacher, 48),
            "peft_config": LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **lora}),
            "optim": optim,
        }

    trained(**given(), save_strategy="steps", save_steps=1, max_steps=1)
    named = ONLY.format(name) if ":" not in name else ONLY.format(name).replace(": .*", " in .*")
    refuses(named, given(**changed), resume=str(tmp_path / "checkpoint-1"))
