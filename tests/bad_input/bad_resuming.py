"""Checkpoints that are missing, damaged, or of another run; none of them is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import Case, Lab
from peft import LoraConfig
from support import tiny

from trl_opsd import OPSDTrainer
from trl_opsd.checkpoints import MANIFEST
from trl_opsd.fingerprint import FILE
from trl_opsd.losses import ForwardKL


def missing(name: str, asked: Callable[[Lab], Any], message: str) -> Case:
    return Case("resume path missing", name, message, lambda lab: lab.make().train(resume_from_checkpoint=asked(lab)))


def torn(name: str, problem: str, tear: Callable[[Path], None]) -> Case:
    def provoke(lab: Lab) -> None:
        checkpoint = lab.checkpoint()
        tear(checkpoint)
        lab.make().train(resume_from_checkpoint=str(checkpoint))

    return Case("resume path torn", name, f"checkpoint-1 is not complete: {problem}", provoke)


def another(name: str, line: str, changed: Callable[[], dict[str, Any]]) -> Case:
    """Exactly one difference: its line is the only one in the message."""

    def provoke(lab: Lab) -> None:
        checkpoint = lab.checkpoint()
        lab.make(**changed()).train(resume_from_checkpoint=str(checkpoint))

    message = rf"differs from the one that saved .*:\n  {line}.*\nRestore them"
    return Case("resume path with another fingerprint", name, message, provoke)


def more_processes(lab: Lab) -> None:
    checkpoint = lab.checkpoint()
    said = json.loads((checkpoint / FILE).read_text())
    (checkpoint / FILE).write_text(json.dumps({**said, "world_size": 2}))
    (checkpoint / MANIFEST).unlink()  # else the manifest reveals the change
    lab.make().train(resume_from_checkpoint=str(checkpoint))


def the_last_one(lab: Lab) -> None:
    lab.checkpoint()
    lab.make(seed=1).train(resume_from_checkpoint=True)


def assigned_objective(lab: Lab) -> None:
    checkpoint = lab.checkpoint()
    trainer: OPSDTrainer = lab.make()
    trainer.divergence = ForwardKL()
    trainer.train(resume_from_checkpoint=str(checkpoint))


def _final(folder: Path, seed: int, width: int) -> str:
    """The path of a saved model; the folder is always named `final`."""
    tiny.qwen2(width, seed).save_pretrained(folder / f"{seed}" / "final")
    return str(folder / f"{seed}" / "final")


def another_with_an_adapter(name: str, line: str, **changed: Any) -> Case:
    """Like [`another`], for a student with an adapter; models are paths that end in `final`."""

    def provoke(lab: Lab) -> None:
        def given(student: int = 0, teacher: int = 1, optim: str = "adamw_torch", **lora: Any) -> dict[str, Any]:
            return {
                "model": _final(lab.folder, student, 32),
                "teacher_model": _final(lab.folder, teacher, 48),
                "peft_config": LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **lora}),
                "optim": optim,
            }

        lab.make_trainer(**given(), save_strategy="steps", save_steps=1, max_steps=1).train()
        lab.make(**given(**changed)).train(resume_from_checkpoint=str(lab.folder / "checkpoint-1"))

    message = rf"differs from the one that saved .*:\n  {line}.*\nRestore them"
    return Case("resume path with another fingerprint", name, message, provoke)


ADAPTERS = [
    another_with_an_adapter(
        "another base under the adapter", r"student: 'Qwen2ForCausalLM \[259, 32\], sha256 \w+' in", student=2
    ),
    another_with_an_adapter(
        "another teacher of the same name",
        r"teacher_weights: \{'teacher': 'sha256 \w+', 'head of teacher': 'sha256 \w+'\} in",
        teacher=3,
    ),
    another_with_an_adapter(
        "alpha", r"adapter: \{'lora_alpha': 8\} in the checkpoint, \{'lora_alpha': 16\} now", lora_alpha=16
    ),
    another_with_an_adapter("rank", r"adapter: \{'r': 4\} in the checkpoint, \{'r': 8\} now", r=8),
    another_with_an_adapter("optimizer", "optimizer: 'adamw_torch' in the checkpoint, 'sgd' now", optim="sgd"),
]

FINGERPRINT = [
    another(
        "beta",
        r"divergence: 'ReverseKL\(\)' in the checkpoint, 'GeneralizedJSD\(beta=0\.3\)' now",
        lambda: {"beta": 0.3},
    ),
    another(
        "divergence",
        r"divergence: 'ReverseKL\(\)' in the checkpoint, 'ForwardKL\(\)' now",
        lambda: {"divergence": "forward_kl"},
    ),
    another("temperature", r"temperature: 1\.0 in the checkpoint, 0\.7 now", lambda: {"temperature": 0.7}),
    another("top_k", "top_k: 0 in the checkpoint, 5 now", lambda: {"top_k": 5}),
    another(
        "generation_kwargs",
        r"generation_kwargs: None in the checkpoint, \{'min_new_tokens': 2\} now",
        lambda: {"generation_kwargs": {"min_new_tokens": 2}},
    ),
    another(
        "max_completion_length",
        "max_completion_length: 24 in the checkpoint, 20 now",
        lambda: {"max_completion_length": 20},
    ),
    another(
        "batch",
        "per_device_train_batch_size: 2 in the checkpoint, 1 now",
        lambda: {"per_device_train_batch_size": 1},
    ),
    another(
        "accumulation",
        "gradient_accumulation_steps: 1 in the checkpoint, 2 now",
        lambda: {"gradient_accumulation_steps": 2},
    ),
    another("seed", "seed: 42 in the checkpoint, 1 now", lambda: {"seed": 1}),
    another(
        "shuffle_dataset",
        "shuffle_dataset: True in the checkpoint, False now",
        lambda: {"shuffle_dataset": False},
    ),
    another(
        "fewer rows",
        r"train_dataset: '8 rows, digest \w+' in the checkpoint, '7 rows, ",
        lambda: {"train_dataset": tiny.rows(7)},
    ),
    another(
        "teacher_prompt_template",
        r"teacher_prompt_template: '\{prompt\}\\n\\n\{privileged_context\}' in the checkpoint",
        lambda: {"teacher_prompt_template": "{privileged_context} {prompt}"},
    ),
    another(
        "teacher",
        r"teachers: \{'teacher': 'Qwen2ForCausalLM \[259, 48\]'\} in the checkpoint, "
        r"\{'teacher': 'Qwen2ForCausalLM \[259, 64\]'\} now",
        lambda: {"teacher_model": tiny.qwen2(64, seed=1)},
    ),
    Case(
        "resume path with another fingerprint",
        "processes",
        "world_size: 2 in the checkpoint, 1 now",
        more_processes,
    ),
    Case("resume path with another fingerprint", "the last checkpoint", "seed: 42", the_last_one),
    Case(
        "resume path with another fingerprint",
        "an objective assigned to the trainer",
        r"'ForwardKL\(\)' now",
        assigned_objective,
    ),
]

CASES: list[Case] = [
    missing("the last of none", lambda lab: True, "There is no complete checkpoint"),
    missing("True as text", lambda lab: "True", "There is no complete checkpoint in"),
    missing("no folder", lambda lab: "no/where", "There is no checkpoint no/where"),
    missing(
        "no folder among checkpoints",
        lambda lab: str(lab.folder / "checkpoint-7"),
        "There is no checkpoint .*checkpoint-7",
    ),
    torn("a file is gone", "optimizer.pt is missing", lambda folder: (folder / "optimizer.pt").unlink()),
    torn("a manifest cut short", f"{MANIFEST} cannot be read", lambda folder: os.truncate(folder / MANIFEST, 40)),
    *FINGERPRINT,
    *ADAPTERS,
]
