"""Starts a script in two processes the way users do, or one that forks its own, and ends it when its time is up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CONFIGS = TESTS.parent / "examples" / "accelerate_configs"
SECONDS = 300
"""What any launch may take, on a machine that is busy."""


def launch(strategy: str, script: Path, *arguments: object, status: int = 0, **environment: str) -> str:
    """Runs a script under `examples/accelerate_configs/<strategy>_cpu.yaml`.

    Returns:
        `str`: What was printed on stderr.

    Raises:
        AssertionError: It ended with another status, or was not done in time; with the end of what it said.
    """
    config = CONFIGS / f"{strategy}_cpu.yaml"
    command = ["accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", *command, script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, said = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes; killed, it would leave them behind
        _, said = process.communicate()
        raise AssertionError(f"{script.name} was not done in {SECONDS} seconds:\n{said[-3000:]}") from None
    assert process.returncode == status, said[-6000:]
    return said


def run(script: Path, *arguments: object, seconds: int) -> str:
    """Runs a script that forks its pairs itself (`forks.py`).

    Returns:
        `str`: What was printed on stdout.

    Raises:
        AssertionError: It failed; with the end of what it said.
        subprocess.TimeoutExpired: It was not done in `seconds`.
    """
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    return finished.stdout
