"""Measures one optimizer step with `bf16=True`, and the dtype in which each phase multiplies.

    python benchmarks/bf16.py                                                 # 135M parameters, on any device
    accelerate launch --config_file trl_opsd/accelerate_configs/zero3.yaml benchmarks/bf16.py

Student and teacher have the shape of SmolLM2-135M in Qwen2's architecture, and different random weights; completions
are given.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import device, options, qwen2, show
from datasets import Dataset

from trl_opsd import FixedRollout, OPSDTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import fsdp_on_cpu, tiny
from support.product_dtypes import WatchedTrainer

Trainer = TypeVar("Trainer", bound=OPSDTrainer)


def save_model(args: argparse.Namespace, seed: int, folder: str) -> str:
    """Saves a random model. To be called before any `OPSDConfig` exists, as ZeRO-3 splits models built after that."""
    heads = {"heads": args.width // 64, "num_key_value_heads": max(args.width // 192, 1)}
    shape = {"intermediate_size": args.width * 8 // 3, "tie_word_embeddings": True, **heads}
    path = f"{folder}/model-{seed}"
    qwen2(args.width, args.layers, args.vocab, seed=seed, **shape).save_pretrained(path)
    return path


def make_trainer(
    args: argparse.Namespace, kind: type[Trainer], student: str, teacher: str, steps: int, folder: str
) -> Trainer:
    tokenizer = tiny.tokenizer()
    prompts = [chr(ord("a") + number) * (args.prompt_tokens - number) for number in range(args.rows)]
    completions = {tuple(tokenizer(prompt)["input_ids"]): [5] * args.tokens for prompt in prompts}
    config = tiny.config(
        folder,
        bf16=not args.float32,
        use_cpu=torch.device(args.device).type == "cpu",
        max_steps=steps,
        per_device_train_batch_size=args.rows,
        max_completion_length=args.tokens,
    )
    fsdp_on_cpu.allow()
    return kind(
        model=student,
        teacher_model=teacher,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * 8}),
        processing_class=tokenizer,
        rollout=FixedRollout(completions),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The dtypes of one instrumented step, and the seconds of others without instrumentation, after a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        models = save_model(args, 0, folder), save_model(args, 1, folder)
        watched = make_trainer(args, WatchedTrainer, *models, 1, folder)
        watched.train()
        timed = make_trainer(args, OPSDTrainer, *models, args.repeats + 1, folder)
        timed.train()
    steps = [entry for entry in timed.state.log_history if "time/compare" in entry][1:]
    return {
        "wrapper": type(timed.model_wrapped).__name__,
        "processes": timed.accelerator.num_processes,
        "dtypes": watched.dtypes(),
        "seconds": {
            phase: statistics.median(entry[f"time/{phase}"] for entry in steps) for phase in ("teach", "compare")
        },
    }


def main() -> None:
    args = options(
        __doc__,
        width=576,
        layers=30,
        vocab=49152,
        rows=2,
        prompt_tokens=64,
        tokens=64,
        repeats=3,
        float32=False,
        device=device(),
    )
    found = measure(args)
    if os.environ.get("RANK", "0") == "0":
        show([found], args.json)


if __name__ == "__main__":
    main()
