"""Sets of options, each trained in one process: those in tables of other tests, and what these leave out."""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import test_pairs
import torch
import variants
import worlds
from datasets import Dataset
from peft import LoraConfig
from small_methods import Discounted
from support import simulated_device, tiny, vision_language
from support.byte_languages import byte_pairs
from support.rollouts import Answering
from visits import SkipNear

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.losses.registry import DIVERGENCES

MINE, YOURS = byte_pairs(120, start=5000), byte_pairs(200)
SIZES = {"max_steps": 2, "gradient_accumulation_steps": 2}
OF_TRAINER = set(inspect.signature(OPSDTrainer.__init__).parameters)


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one) % 3) for one in completions]


def columns(**more: Any) -> Dataset:
    return Dataset.from_dict({"prompt": tiny.PROMPTS, **more})


def images(family: str, numbers: tuple[int, ...] = variants.IMAGES, **more: Any) -> dict[str, Any]:
    return {**vision_language.arguments(family), "train_dataset": vision_language.rows(numbers), **more}


def by_bytes(**more: Any) -> dict[str, Any]:
    models = {
        "model": tiny.qwen2(32, vocab_size=len(MINE) + 3),
        "teacher_model": tiny.qwen2(48, 1, vocab_size=len(YOURS) + 5),
    }
    words = {"processing_class": MINE, "teacher_processing_class": YOURS}
    return {**models, **words, "train_dataset": columns(), "cross_tokenizer": "bytes", **more}


def several(hint: bool = False, **more: Any) -> dict[str, Any]:
    texts = {f"{kind}_context": [f"{kind} {row}" for row in range(8)] for kind in ("privileged", "contrast") if hint}
    teachers = {"a": tiny.qwen2(48, 1), "b": tiny.qwen2(32, 2)}
    return {"teacher_model": teachers, "train_dataset": columns(teacher=["a", "b"] * 4, **texts), **more}


def contrast(**more: Any) -> dict[str, Any]:
    texts = {
        "privileged_context": [f"hint {row}" for row in range(8)],
        "contrast_context": [f"no {row}" for row in range(8)],
    }
    return {
        "train_dataset": columns(**texts),
        "contrast_weight": 0.5,
        "contrast_clip": 2.0,
        "anchor_weight": 0.1,
        **more,
    }


EVALUATED = {"eval_dataset": tiny.rows(4), "eval_strategy": "steps", "eval_steps": 1}
GROUPS = {"num_generations": 2, "reward_funcs": lengths}
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"divergence {name}": partial(dict, divergence=name) for name in DIVERGENCES},
    "k likeliest": lambda: {"top_k_teacher": 5},
    "clip": lambda: {"kl_clip": 0.05},
    "generation": lambda: {"rollout": HFRollout()},
    "importance": lambda: {"rollout": HFRollout(), "divergence": "sampled_reverse_kl", "num_generations": 2},
    "sequences of the teacher": lambda: {"seq_kd": True, "lmbda": 0.5},
    "rewards": lambda: {**GROUPS, "reward_weight": 0.5},
    "prompt weights": lambda: {
        "methods": [SkipNear(1e9)], "max_steps": 5, "remove_unused_columns": False
    },
    "two teachers": lambda: {
        "teacher_model": {"a": tiny.qwen2(48, 1), "b": tiny.qwen2(32, 2)},
        "train_dataset": columns(teacher=["a", "b"] * 4),
        "token_selection": "teacher_divergence", "token_fraction": 0.5,
    },
    "two teachers, streamed": lambda: several(teacher_offload="stream", token_selection="teacher_confidence",
                                              token_fraction=0.5, report=True),
    "two teachers, contrast, cpu": lambda: several(hint=True, teacher_offload="cpu", contrast_weight=0.5),
    "bytes, two teachers, streamed": lambda: by_bytes(**{
        **several(teacher_offload="stream", report=True),
        "teacher_model": {name: tiny.qwen2(48, seed, vocab_size=len(YOURS) + 5) for seed, name in enumerate("ab")},
    }),
    "report": lambda: {"report": True, **EVALUATED},
    "checkpointing": lambda: {"gradient_checkpointing": True},
    "bf16": lambda: {"bf16": True},
    "discount": lambda: {"methods": [Discounted(0.99)], "token_selection": "student_surprise", "token_fraction": 0.5},
    "bytes, small tiles": lambda: by_bytes(loss_chunk_tokens=3, report=True, **EVALUATED),
    "bytes, rewards, host memory": lambda: by_bytes(**GROUPS, reward_weight=0.5, teacher_cache_device="cpu"),
    "bytes, lora": lambda: by_bytes(peft_config=LoraConfig(**variants.LORA)),
    "contrast, report": lambda: contrast(report=True),
    "contrast, host memory": lambda: contrast(teacher_cache_device="cpu"),
    **{f"images {family}": partial(images, family) for family in ("gemma3", "llava_next", "qwen3_vl")},
    "images, report": lambda: images("qwen2_5_vl", report=True),
    "images, anchor": lambda: images("qwen2_5_vl", anchor_weight=0.2, teacher_cache_device="cpu"),
}  # fmt: skip
"""Options of a training that other tests' tables lack."""


def build(folder: Path, given: dict[str, Any], kind: type[OPSDTrainer] = OPSDTrainer) -> OPSDTrainer:
    """A trainer of tiny models, by arguments of the trainer and options."""
    given = dict(given)
    given["methods"] = [*tiny.rewards(given), *given.get("methods", ())]
    of_trainer = {name: one for name, one in given.items() if name in OF_TRAINER}
    options = {name: one for name, one in given.items() if name not in OF_TRAINER}
    defaults = {"model": tiny.qwen2(32), "teacher_model": tiny.qwen2(48, seed=1), "train_dataset": tiny.rows()}
    defaults |= {"processing_class": tiny.tokenizer(), "rollout": Answering(vision_language.answer)}
    return kind(args=tiny.config(folder, **{**SIZES, **options}), **{**defaults, **of_trainer})


def learned(trainer: OPSDTrainer) -> np.ndarray:
    """Losses and weights after a training."""
    trainer.train()
    losses = torch.tensor(tiny.logged(trainer, "loss") + tiny.logged(trainer, "eval_loss"))
    return torch.cat([losses, tiny.weights(trainer)]).numpy()


def resumed(folder: Path) -> np.ndarray:
    """The same after a checkpoint."""
    options = {"save_strategy": "steps", "save_steps": 1, "teacher_model_kind": "ema", "teacher_model": None}
    rows = columns(privileged_context=["hint"] * 8)
    build(folder, {**options, "max_steps": 1, "train_dataset": rows}).train()
    trainer = build(folder, {**options, "train_dataset": rows})
    trainer.train(resume_from_checkpoint=True)
    return tiny.weights(trainer).numpy()


def predicted(folder: Path) -> np.ndarray:
    found = build(folder, {"rollout": HFRollout()}).predict(tiny.rows(4)).metrics
    return np.array([float(one) for name, one in found.items() if "time" not in name and "second" not in name])


def logs(folder: Path) -> np.ndarray:
    """Of agents in environments that tell their teacher what happened, with an evaluation."""
    return np.array([float(one) for one in worlds.figures(folder, 1, 4).values()])


def paired(folder: Path, name: str) -> np.ndarray:
    found = test_pairs.trained(folder, (name,))
    return np.concatenate([[one or 0.0 for one in found["losses"]], found["weights"]])


def varied(folder: Path, name: str) -> np.ndarray:
    models = folder.parent / "models"
    if not models.exists():
        variants.save_models(models)
    return learned(variants.build(models, variants.of("ddp")[name][1], 1))


CASES: dict[str, Callable[[Path], np.ndarray]] = {
    **{f"pairs: {name}": partial(paired, name=name) for name in test_pairs.VARIANTS},
    **{f"variants: {name}": partial(varied, name=name) for name in variants.of("ddp")},
    **{name: lambda folder, given=given: learned(build(folder, given())) for name, given in OTHERS.items()},
    "resumed": resumed,
    "predict": predicted,
    "agents": logs,
}


def initial(weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    with torch.no_grad():
        return weight.copy_(drawn / weight.size(1) ** 0.5)


def outcomes(folder: Path, names: list[str], on_device: bool) -> dict[str, np.ndarray | str]:
    """What each case gives, or its error, on the CPU or on the simulated device. For a process of its own."""
    options, found = tiny.options, dict[str, Any]()
    if on_device:
        simulated_device.install()
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated_device.NAME}:0"
    warnings.simplefilter("ignore")
    torch.nn.init.kaiming_uniform_ = initial  # of adapters, which are drawn on the device
    with patch.object(tiny, "options", lambda folder, **given: options(folder, use_cpu=not on_device, **given)):
        for place, name in enumerate(names):
            case = folder / ("device" if on_device else "cpu") / str(place)
            case.mkdir(parents=True)
            torch.manual_seed(0)
            try:
                found[name] = CASES[name](case)
            except Exception:
                found[name] = traceback.format_exc()
    return found
