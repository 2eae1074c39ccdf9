"""Measures agents whose tools take time: calls of a batch together, and a step that learns while others still act.

    python benchmarks/agents.py

First, each of 16 rows calls a tool of 50 ms in each of two turns: seconds per turn, with a function in `tools`, which
TRL calls row by row, and with environments. Then rows of one to four turns are at a server, which takes --turn seconds
for each, and so does each call. The rest is what the step that waits takes when its rows have ended: to teach and to
learn. The last column is the step divided by max(rollout, rest), which no schedule with two devices can go below.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from environments.test_apart import Server
from environments.worlds import END, Adder, call, given, rows
from support import tiny

from trl_opsd import OPSDTrainer

ROWS = 16


def turns(least: int, most: int, seconds: float) -> Callable[[str], str]:
    """An agent that makes so many calls of so many seconds, which differ from row to row, and then ends."""

    def write(prompt: str) -> str:
        asked = least + int(re.findall(r"count (\d+)", prompt)[-1]) % (most - least + 1)
        return call("sleep", seconds=seconds) if prompt.count("<tool_response>") < asked else f"done{END}"

    return write


def trainer(arguments: dict[str, Any], folder: str, **options: Any) -> OPSDTrainer:
    options |= {name: arguments.pop(name) for name in ("max_completion_length", "max_steps")}
    return OPSDTrainer(args=tiny.config(Path(folder), num_train_epochs=100, logging_steps=1, **options), **arguments)


def seconds_of_a_turn(acting: dict[str, Any], asked: argparse.Namespace, folder: str) -> float:
    """Median over steps, of turns in which all rows call."""
    arguments = given(turns(2, 2, asked.call), train_dataset=rows(ROWS), max_steps=asked.steps)
    del arguments["environment_factory"]
    one = trainer({**arguments, **acting}, folder, per_device_train_batch_size=ROWS)
    one.train()
    return statistics.median(log["time/act"] / 2 for log in one.state.log_history if "time/act" in log)


def step(overlap: str | None, asked: argparse.Namespace, folder: str) -> tuple[float, float]:
    """Seconds of a step and of its rollout: medians without the first step."""
    write = turns(0, 3, asked.turn)
    arguments = given(write, rollout=Server(write), train_dataset=rows(ROWS), max_steps=asked.steps + 1)
    arguments["rollout"].seconds = asked.turn
    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": ROWS // 2}
    one = trainer(arguments, folder, overlap=overlap, **batch)
    one.train()
    logs = [log for log in one.state.log_history if "step_time" in log][1:]
    return statistics.median(log["step_time"] for log in logs), statistics.median(log["time/complete"] for log in logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", type=float, default=0.05, help="seconds of a call")
    parser.add_argument("--turn", type=float, default=0.4, help="seconds of a turn at the server, and of its call")
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the models are tiny
    with tempfile.TemporaryDirectory() as folder:
        print(f"| {ROWS} calls of {asked.call:g} s | seconds per turn |\n|---|---|")
        for name, acting in (("`tools`", {"tools": [Adder().sleep]}), ("environments", {"environment_factory": Adder})):
            print(f"| {name} | {seconds_of_a_turn(acting, asked, folder):.3f} |")
        waits, rollout = step(None, asked, folder)
        overlaps, _ = step("step", asked, folder)
        print("\n| step | seconds | rollout | rest | step ÷ max |\n|---|---|---|---|---|")
        for name, found in (("waits", waits), ('`overlap="step"`', overlaps)):
            most = max(rollout, waits - rollout)
            print(f"| {name} | {found:.2f} | {rollout:.2f} | {waits - rollout:.2f} | {found / most:.2f} |")


if __name__ == "__main__":
    main()
