"""Adapters as teachers: the numbers of merged models, from one copy of their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from support import tiny
from transformers import AutoModelForCausalLM

NAMES = ["math", "code", "chat", "math", "chat", "code", "math", "math"]
LORA = {"r": 4, "target_modules": "all-linear"}
KINDS: dict[str, Any] = {
    "lora": {"math": LORA, "code": {"r": 2, "target_modules": ["q_proj", "down_proj"]}, "chat": LORA},
    "variants": {
        "math": {**LORA, "use_dora": True},
        "code": {**LORA, "use_rslora": True, "lora_alpha": 16},
        "chat": {**LORA, "modules_to_save": ["lm_head"]},
    },
    "heads": {
        "math": {**LORA, "modules_to_save": ["lm_head"]},
        "code": {**LORA, "modules_to_save": ["lm_head", "norm"]},
        "chat": {"r": 4, "target_modules": ["q_proj", "embed_tokens"]},
    },
}
OFFLOADS = ["none", "cpu", "stream"]


@torch.no_grad()
def save_adapter(base: Path, folder: Path, config: Any, seed: int) -> None:
    """Saves an adapter that is far from its base, and beside it the model that it makes when merged."""
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            spread = 0.3 if "lora_" in name else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    model.merge_and_unload().save_pretrained(f"{folder}-merged")


def saved(folder: Path, kinds: dict[str, Any], **of_base: Any) -> tuple[Path, dict[str, str]]:
    """A base with its tokenizer, and adapters of it by name."""
    base = folder / "base"
    tiny.qwen2(48, 1, **of_base).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    paths = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        config = LoraConfig(**kind) if isinstance(kind, dict) else kind
        save_adapter(base, folder / name, config, seed)
        paths[name] = str(folder / name)
    return base, paths


def merged(paths: dict[str, str]) -> dict[str, str]:
    return {name: f"{path}-merged" for name, path in paths.items()}


def given(teachers: dict[str, str]) -> dict[str, Any]:
    """One teacher, or several with rows that name them."""
    if len(teachers) == 1:
        return {"teacher_model": next(iter(teachers.values()))}
    names = [name if name in teachers else "math" for name in NAMES]
    return {"teacher_model": teachers, "train_dataset": tiny.rows().add_column("teacher", names)}


def step(trainer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of all rows."""
    inputs = trainer._generate_and_score_completions(list(trainer.train_dataset))
    loss = trainer._compute_loss(trainer.model, inputs, torch.tensor(50.0))[0]
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def assert_same(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("student", ["full", "lora", "lora of the base"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [1, 3])
def test_gradients_are_those_of_merged_teachers(make_trainer, tmp_path, number, kind, student, offload):
    base, paths = saved(tmp_path, dict(list(KINDS[kind].items())[:number]))
    of_student: dict[str, Any] = {"peft_config": None if student == "full" else LoraConfig(**LORA)}
    if student == "lora of the base":
        of_student["model"] = str(base)
    options = {**of_student, "per_device_train_batch_size": 8}
    expected = step(make_trainer(**given(merged(paths)), **options))
    trainer = make_trainer(**given(paths), teacher_offload=offload, **options)
    assert_same(step(trainer), expected)
