"""Measures steps with an engine, a teacher and a trainer as three processes, with and without `overlap`.

    python benchmarks/overlap_processes.py --repeats 2

A real vLLM server writes, another one reads, this process learns: random models, whose rows end
at tokens that are drawn, so that lengths are geometric. The engine has a core of its own and the other two share one,
with a thread each, so that max(rollout, teach + learn), as measured in the steps that wait, bounds a step that
overlaps. Runs alternate; seconds are medians over their steps without the first of each, with the smallest and the
largest. Other programs on these cores count as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rollout"))

import pytest
import server_lab
import tcp_transfer
import torch
from datasets import Dataset
from support import serving, tiny
from transformers import PrinterCallback, TrainerCallback

from trl_opsd import OPSDTrainer
from trl_opsd.describe import Banner

OVERLAPS = (None, "step", "ahead")
ENDS = [200, 201, 202, 203]
"""Tokens at which a row ends, of 259."""


class Steps(TrainerCallback):
    """Times the steps of a run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def save(folder: Path, width: int, layers: int, seed: int) -> str:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    tiny.qwen2(width, seed, **sizes).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def run(overlap: str | None, asked: argparse.Namespace, folder: Path, **options: Any) -> list[dict[str, float]]:
    """What was logged of each step of a training but the first, and its seconds."""
    steps = Steps()
    trainer = OPSDTrainer(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=tiny.config(
            folder / "out",
            overlap=overlap,
            max_completion_length=asked.longest,
            per_device_train_batch_size=asked.at_once,
            gradient_accumulation_steps=asked.rows // asked.at_once,
            max_steps=asked.steps + 1,
            learning_rate=1e-9,
            logging_steps=1,
            generation_kwargs={"stop_token_ids": ENDS},
            use_vllm=True,
            vllm_sync_check="never",
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"row {row:04}" for row in range(asked.rows * (asked.steps + 1))]}),
        callbacks=[steps],
    )
    for callback in (PrinterCallback, Banner):
        trainer.remove_callback(callback)
    trainer.train()
    trainer.rollout.close()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{**entry, "seconds": seconds} for entry, seconds in zip(logs, steps.seconds, strict=True)][1:]


def table(found: dict[str | None, list[dict[str, float]]]) -> str:
    """The figures in Markdown; the bound is that of the steps that wait."""
    parts = {
        name: statistics.median(step[f"time/{name}"] for step in found[None])
        for name in ("complete", "teach", "compare")
    }
    bound = max(parts["complete"], parts["teach"] + parts["compare"])
    lines = [
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items()) + f"; bound {bound:.2f} s",
        "| overlap | steps | seconds, median (range) | ÷ max(rollout, teach + learn) |",
        "|---|---|---|---|",
    ]
    for overlap, steps in found.items():
        seconds = [step["seconds"] for step in steps]
        middle = statistics.median(seconds)
        spread = f"{middle:.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
        lines.append(f"| {overlap} | {len(steps)} | {spread} | {middle / bound:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--at-once", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--longest", type=int, default=160, help="most tokens of a completion")
    parser.add_argument("--student", type=int, nargs=2, default=[128, 4], help="its width and layers")
    parser.add_argument("--teacher", type=int, nargs=2, default=[256, 4])
    parser.add_argument("--steps", type=int, default=4, help="steps of a run that count")
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        save(folder / "student", *asked.student, seed=0)
        save(folder / "teacher", *asked.teacher, seed=1)
        os.sched_setaffinity(0, cores[:1])  # which processes inherit that are started now
        with server_lab.running(folder, str(folder / "student"), context=256) as server:
            os.sched_setaffinity(0, cores[-1:])
            with serving.pooling(str(folder / "teacher"), folder / "teacher.log") as teacher:
                tcp_transfer.use(patch)
                found: dict[str | None, list[dict[str, float]]] = {overlap: [] for overlap in OVERLAPS}
                for _ in range(asked.repeats):
                    for overlap in OVERLAPS:
                        url = {"teacher_server_url": teacher}
                        found[overlap] += run(overlap, asked, folder, **url, **server)
                print(table(found))


if __name__ == "__main__":
    main()
