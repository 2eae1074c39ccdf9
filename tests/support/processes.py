"""Runs a script in two processes as users do, or one that forks its own, with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trl_opsd

TESTS = Path(__file__).parents[1]
CONFIGS = Path(trl_opsd.__file__).parent / "accelerate_configs"
SECONDS = 300
"""Time limit of a launch; generous, for a busy machine."""


def launch(strategy: str, script: Path, *arguments: object, status: int = 0, **environment: str) -> str:
    """Runs a script under `trl_opsd/accelerate_configs/<strategy>_cpu.yaml`; returns what it printed on stderr."""
    config = CONFIGS / f"{strategy}_cpu.yaml"
    command = ["accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, script, *map(str, arguments)],
        env={**_environment(), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes; killed, it would leave them behind
        _, said = process.communicate()
        raise AssertionError(f"{script.name} did not finish in {SECONDS} seconds:\n{said[-3000:]}") from None
    assert process.returncode == status, said[-6000:]
    return said


def run(script: Path, *arguments: object, seconds: int) -> str:
    """Runs a script that forks its pairs itself (`forks.py`); returns what it printed on stdout."""
    finished = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env={**_environment(), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    return finished.stdout


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}
