"""Measures one optimizer step with `bf16=True`, and the dtype in which each phase multiplies.

    python benchmarks/bf16.py                                                 # 135M parameters, on any device
    accelerate launch --config_file trl_opsd/accelerate_configs/zero3.yaml benchmarks/bf16.py

Student and teacher have the shape of SmolLM2-135M and different random weights; completions are given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import fsdp_on_cpu, tiny
from support.product_dtypes import PHASES, WatchedTrainer

Trainer = TypeVar("Trainer", bound=OPSDTrainer)


def save_model(args: argparse.Namespace, seed: int, folder: str) -> str:
    """Saves a random model. To be called before any `OPSDConfig` exists, as ZeRO-3 splits models built after that."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=args.width * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=max(args.width // 192, 1),
        vocab_size=args.vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    path = f"{folder}/model-{seed}"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def make_trainer(
    args: argparse.Namespace, kind: type[Trainer], student: str, teacher: str, steps: int, folder: str
) -> Trainer:
    tokenizer = tiny.tokenizer()
    prompts = [chr(ord("a") + number) * (args.prompt_tokens - number) for number in range(args.rows)]
    completions = {tuple(tokenizer(prompt)["input_ids"]): [5] * args.tokens for prompt in prompts}
    config = OPSDConfig(
        folder,
        bf16=not args.float32,
        use_cpu=args.device == "cpu",
        max_steps=steps,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        max_completion_length=args.tokens,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
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


def table(found: dict[str, Any]) -> str:
    phases = [phase for phase in PHASES if phase in found["dtypes"]]
    rows = [
        ["phase", *phases, "teach", "compare"],
        ["---"] * (len(phases) + 3),
        [
            f"{found['processes']} x {found['wrapper']}",
            *(", ".join(found["dtypes"][phase]) for phase in phases),
            *(f"{seconds:.2f} s" for seconds in found["seconds"].values()),
        ],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--float32", action="store_true", help="for comparison")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found, indent=2) if args.json else table(found))


if __name__ == "__main__":
    main()
