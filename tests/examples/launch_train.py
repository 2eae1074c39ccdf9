"""Run as a process of its own: `train.py` in two processes under ZeRO-3, once for the whole student, once with LoRA."""

from __future__ import annotations

import sys
from pathlib import Path

import forks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train


def run(*arguments: str) -> None:
    train.main(arguments)


if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    forks.launch("zero3_cpu", run, *options, "--output_dir", f"{folder}/whole")
    forks.launch("zero3_cpu", run, *options, "--output_dir", f"{folder}/adapter", "--use_peft", "--lora_r", "4")
