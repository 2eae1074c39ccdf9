"""Trainings on the simulated device, each in one process: what they learn, and what the host waits for in a step."""

from __future__ import annotations

import inspect
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from support import simulated_device, tiny, vision_language
from support.byte_languages import byte_pairs
from support.rollouts import Answering
from support.simulated_device import waits
from transformers import TrainerCallback
from visits import SkipNear

from trl_opsd import HFRollout, OPSDTrainer
from trl_opsd.bytes import teacher as bytewise
from trl_opsd.losses import DIVERGENCES
from trl_opsd.methods import Blend
from trl_opsd.teacher import comparison

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


TEXTS = {f"{kind}_context": [f"{kind} {row}" for row in range(8)] for kind in ("privileged", "contrast")}


def several(**more: Any) -> dict[str, Any]:
    teachers = {"a": tiny.qwen2(48, 1), "b": tiny.qwen2(32, 2)}
    return {"teacher_model": teachers, "train_dataset": columns(teacher=["a", "b"] * 4, **TEXTS), **more}


def contrast(**more: Any) -> dict[str, Any]:
    weights = {"contrast_weight": 0.5, "contrast_clip": 2.0, "anchor_weight": 0.1}
    return {"train_dataset": columns(**TEXTS), **weights, **more}


EVALUATED = {"eval_dataset": tiny.rows(4), "eval_strategy": "steps", "eval_steps": 1}
GROUPS = {"num_generations": 2, "reward_funcs": lengths}
OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"divergence {name}": partial(dict, divergence=name) for name in DIVERGENCES},
    "generation": lambda: {"rollout": HFRollout()},
    "importance": lambda: {"rollout": HFRollout(), "divergence": "sampled_reverse_kl", "num_generations": 2},
    "sequences of the teacher": lambda: {"seq_kd": True, "lmbda": 0.5},
    "two teachers, streamed": lambda: several(teacher_offload="stream", token_selection="teacher_confidence",
                                              token_fraction=0.5, report=True),
    "two teachers that write, streamed": lambda: several(teacher_offload="stream", methods=[Blend(0.5)],
                                                         rollout=HFRollout(), max_completion_length=6),
    "two teachers, contrast, cpu": lambda: several(teacher_offload="cpu", contrast_weight=0.5),
    "bytes, two teachers, streamed": lambda: by_bytes(**{
        **several(teacher_offload="stream", report=True),
        "teacher_model": {name: tiny.qwen2(48, seed, vocab_size=len(YOURS) + 5) for seed, name in enumerate("ab")},
    }),
    "report": lambda: {"report": True, **EVALUATED},
    "checkpointing": lambda: {"gradient_checkpointing": True},
    "bf16": lambda: {"bf16": True},
    "bytes, small tiles": lambda: by_bytes(loss_chunk_tokens=3, report=True, **EVALUATED),
    "bytes, rewards, host memory": lambda: by_bytes(**GROUPS, reward_weight=0.5, teacher_cache_device="cpu"),
    "bytes, lora": lambda: by_bytes(peft_config=LoraConfig(**variants.LORA)),
    "contrast, host memory": lambda: contrast(teacher_cache_device="cpu"),
    **{f"images {family}": partial(images, family) for family in ("gemma3", "llava_next", "qwen3_vl")},
    "images, report": lambda: images("qwen2_5_vl", report=True),
    "agents": lambda: {
        **worlds.given(worlds.once(worlds.call(number=1)), worlds.Adder), "report": True,
        "eval_dataset": worlds.rows(), "eval_strategy": "epoch",
    },
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


def paired(folder: Path, name: str) -> np.ndarray:
    found = test_pairs.trained(folder, (name,))
    return np.concatenate([[one or 0.0 for one in found["losses"]], found["weights"]])


def varied(folder: Path, name: str) -> np.ndarray:
    models = folder.parent / "models"
    if not models.exists():
        variants.save_models(models)
    return learned(variants.build(models, variants.of("ddp")[name][1], 1))


CASES: dict[str, Callable[[Path], np.ndarray]] = {  # torch.compile knows streams of real devices alone
    **{f"pairs: {name}": partial(paired, name=name) for name in test_pairs.VARIANTS if name != "compiled"},
    **{f"variants: {name}": partial(varied, name=name) for name in variants.of("ddp") if "compiled" not in name},
    **{name: lambda folder, given=given: learned(build(folder, given())) for name, given in OTHERS.items()},
    "resumed": resumed,
    "predict": predicted,
}


def initial(weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    with torch.no_grad():
        return weight.copy_(drawn / weight.size(1) ** 0.5)


@contextmanager
def installed() -> Iterator[None]:
    """Has all trainings of this process be on the simulated device."""
    options = tiny.options
    simulated_device.install()
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{simulated_device.NAME}:0"
    with patch.object(tiny, "options", lambda folder, **given: options(folder, use_cpu=False, **given)):
        yield


def of_each(names: Iterable[str], found: Callable[[str], Any]) -> dict[str, Any]:
    """What is found, or the error, by name."""
    results = dict[str, Any]()
    warnings.simplefilter("ignore")
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = found(name)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def outcomes(folder: Path, names: list[str], on_device: bool) -> dict[str, np.ndarray | str]:
    """What each case gives, or its error, on the CPU or on the simulated device. For a process of its own."""

    def outcome(name: str) -> np.ndarray:
        case = folder / f"{on_device}" / f"{names.index(name)}"
        case.mkdir(parents=True)
        return CASES[name](case)

    torch.nn.init.kaiming_uniform_ = initial  # of adapters, which are drawn on the device
    with installed() if on_device else nullcontext():
        return of_each(names, outcome)


# ---- What the host waits for -----------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "text": dict,
    "images": lambda: images("qwen2_5_vl"),
    "generation": lambda: images("qwen2_5_vl", rollout=HFRollout()),
    "bytes": by_bytes,
    "contrast": contrast,
    "groups": lambda: {
        **GROUPS, "reward_weight": 0.5, "methods": [SkipNear(100.0)],
        "token_selection": "student_entropy", "token_fraction": 0.5,
    },
}  # fmt: skip
MICRO_BATCHES = 4  # of two rows
PARTS = ("teacher", "student", "loss", "step")
Waited = Counter[tuple[str, str]]
"""By part of the step, and line."""


class Last(TrainerCallback):
    """Counts in the last step: the first ones look at what they meet for the first time."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        waits.phase = "step" if state.global_step + 1 == args.max_steps else None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        waits.phase = None


class Counted(OPSDTrainer):
    """What is in no other part is "step"."""

    def teach(self, *args: Any) -> Any:
        with part("teacher"):
            return super().teach(*args)

    def compare(self, *args: Any) -> Any:
        with part("loss"):
            return super().compare(*args)


@contextmanager
def part(name: str) -> Any:
    with waits.during(name if waits.phase else None):
        yield


def counted(folder: Path, names: tuple[str, ...]) -> dict[str, tuple[Waited, Waited] | str]:
    """The results that a step of each case reads, and the copies that block, or its error. For a process of its own."""

    def student(hidden: Callable[..., Any], *args: Any) -> Any:
        with part("student"):
            return hidden(*args)

    def waited(name: str) -> tuple[Waited, Waited]:
        options = {**KINDS[name](), "gradient_accumulation_steps": MICRO_BATCHES, "max_steps": 2}
        one = build(folder / name, options, Counted)
        one.add_callback(Last())
        backward = one.accelerator.backward

        def of_loss(*args: Any, **more: Any) -> None:
            with part("loss"):
                backward(*args, **more)

        one.accelerator.backward = of_loss
        waits.reads.clear()
        waits.copies.clear()
        one.train()
        return waits.reads.copy(), waits.copies.copy()

    with installed(), ExitStack() as patched:
        for module, name in (
            (comparison, "completion_hidden"),
            (bytewise, "forked_hidden"),
            (bytewise, "completion_hidden"),
        ):
            patched.enter_context(patch.object(module, name, partial(student, getattr(module, name))))
        return of_each(names, waited)
