"""An agent of `examples/house` that acts, and one that learns from recorded episodes: accuracy, calls, seconds.

    python benchmarks/recorded.py --models out/house/models --output out/recorded

Recorded are walks of somebody who searches and sometimes strays. From these the student learns whole (off-policy),
beside rows that act, or from the turn that it writes itself after a drawn beginning, without a call of the environment.
All runs have the same number of seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from agents import TASKS
from compare_agents import BATCH, Judge, Method, environment

from trl_opsd import OPSDConfig, OPSDTrainer, before_turn

TASK = TASKS["house"]
ROWS = 7500


class Until(TrainerCallback):
    """Ends a run after some seconds of training."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.spent = state.global_step, time.perf_counter() - self.began
        control.should_training_stop = self.spent > self.seconds


def counted(calls: list[str]) -> type:
    """The house, which notes each call."""

    class World(environment(TASK, Method())):
        def go(self, room: str) -> str:
            calls.append("go")
            return super().go(room)

        def take(self) -> str:
            calls.append("take")
            return super().take()

        def open(self) -> str:
            calls.append("open")
            return super().open()

    for name in ("go", "take", "open"):
        getattr(World, name).__doc__ = getattr(TASK.environment, name).__doc__
    return World


def episodes(seed: int) -> Dataset:
    """Recorded walks, with what the teacher reads."""
    source, found = random.Random(seed), []
    for row in TASK.world.rows(ROWS, seed=seed):
        walk = TASK.walk(row, source.choice(("searched", "mistaken")), source)
        world = TASK.environment()
        world.reset(**row)
        found.append({**row, "messages": walk.messages, "privileged_context": world.get_privileged_context()})
    return Dataset.from_list(found, on_mixed_types="use_json")


def trained(way: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    calls, until = list[str](), Until(asked.seconds)
    options: dict[str, Any] = {
        "output_dir": str(asked.output / "scratch"), "max_steps": 100_000, "per_device_train_batch_size": BATCH,
        "learning_rate": asked.learning_rate, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10,
        "adam_beta2": 0.98, "seed": seed, "logging_steps": 10, "dataloader_pin_memory": False, "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "divergence": "forward_kl", "max_completion_length": TASK.world.MOST_TOKENS,
        "max_tool_calling_iterations": TASK.world.MOST_CALLS,
    }  # fmt: skip
    given: dict[str, Any] = {"environment_factory": counted(calls), "train_dataset": TASK.world.rows(ROWS, seed=seed)}
    if way != "acts":
        rows = episodes(seed)
        given = {"train_dataset": rows.remove_columns(["seed", "rooms"])}
        options["lmbda"] = 0.0
    if way.startswith("goes on"):
        cut = partial(before_turn, seed=seed, is_scored="scored" in way)
        given["train_dataset"] = given["train_dataset"].map(cut, with_indices=True, remove_columns=["messages"])
        options["lmbda"] = 1.0
    trainer = OPSDTrainer(
        model=str(asked.models / "student"), teacher_model=str(asked.models / "teacher"), args=OPSDConfig(**options),
        callbacks=[until], **given,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    judge = Judge(TASK, asked.models, asked.output, asked.held_out, is_told=False)
    figures = judge.measure(trainer.model)
    return {"steps": until.steps, "seconds": until.spent, "calls": len(calls), **figures}


WAYS = ("acts", "goes on after a drawn beginning", "goes on, what was recorded is scored", "recorded, whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="made by `benchmarks/agents.py house`")
    parser.add_argument("--output", type=Path, default=Path("out/recorded"))
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    print("| way | seed | steps | calls | " + " | ".join(f"{level} rooms" for level in TASK.world.LEVELS) + " |")
    for way in asked.ways:
        for seed in asked.seeds:
            found = trained(way, seed, asked)
            with (asked.output / "runs.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"way": way, "seed": seed, **found}) + "\n")
            shares = " | ".join(f"{found[f'sampled/{level}']:.2f}" for level in TASK.world.LEVELS)
            print(f"| {way} | {seed} | {found['steps']} | {found['calls']:,} | {shares} |", flush=True)
    runs = [json.loads(line) for line in (asked.output / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    for way in asked.ways:
        some = [one for one in runs if one["way"] == way]
        each = (mean(one[f"sampled/{level}"] for one in some) for level in TASK.world.LEVELS)
        print(f"{way}: {', '.join(f'{share:.2f}' for share in each)}, {mean(one['calls'] for one in some):,.0f} calls")


if __name__ == "__main__":
    main()
