"""`benchmarks/gpu.py`: its checks pass at toy sizes, and all limits are within the budget."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import forks, simulated_device

DEVICE = f"{simulated_device.NAME}:0"
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    return importlib.import_module("gpu")


QUICK = ("ceilings", "losses", "attention", "contrast", "bytes")
TOYS = (*QUICK, "loss_speed", "precision", "resume", "teacher", "steps", "pictures", "rollouts")


def findings_of(name: str, path: Path, device: str) -> list[dict[str, Any]]:
    from gpu_checks import CHECKS, LATER, findings

    module, _, function = {**CHECKS, **LATER}[name].place.partition(":")
    getattr(importlib.import_module(module), function)(findings.Findings(path, device, toy=True))
    return findings.read(path)[0]


def test_all_limits_are_within_the_budget(gpu):
    assert sum(check.limit for check in gpu.CHECKS.values()) <= gpu.BUDGET


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.long] * (one in ("teacher", "steps", "pictures", "rollouts")))
        for one in TOYS
    ],
)
def test_a_check_at_toy_size_passes(gpu, tmp_path, name):
    seen = findings_of(name, tmp_path / "findings", "cpu")
    assert len(seen) > 2
    assert not [one for one in seen if one["verdict"] == "FAIL"]


def on_device(folder: Path, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]] | str]:
    """The findings of checks on the simulated device, or the error of one. For a process of its own."""
    sys.path.insert(0, str(FOLDER))
    simulated_device.install()
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = findings_of(name, folder / name, DEVICE)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """What a check found on the simulated device; the quick ones share a process, and all others another."""

    @cache
    def found(is_quick):
        names = tuple(name for name in TOYS if (name in QUICK) is is_quick)
        return forks.results("alone", on_device, tmp_path_factory.mktemp("findings"), names)[0]

    return lambda name: found(name in QUICK)[name]


@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one not in QUICK)) for one in TOYS])
def test_a_check_passes_on_an_accelerator(simulated, name):
    """Else its first run on a GPU would end where it breaks."""
    seen = simulated(name)
    assert not isinstance(seen, str), seen
    assert len(seen) > 2
    assert not [one for one in seen if one["verdict"] == "FAIL"]


KERNELS = """
import pathlib, sys, torch
sys.path.insert(0, sys.argv[1])
from gpu_checks.findings import Findings
from gpu_checks.losses import kernels
from trl_opsd.losses import fused

class Launches:  # whose number is that of the tensors' device while the kernel is launched
    def __getitem__(self, grid):
        return lambda *args, **more: (seen.append(current[-1]), launch[grid](*args, **more))

class Device:
    def __init__(self, index):
        self.index = index
    def __enter__(self):
        current.append(self.index)
    def __exit__(self, *exception):
        current.pop()

seen, current, launch, fused._rows = [], ["none is set"], fused._rows, Launches()
torch.accelerator.device_index = Device
kernels(Findings(pathlib.Path(sys.argv[2]), "cpu"))
assert set(seen) == {torch.device("cpu").index} and len(seen) > 26, seen
"""


@pytest.mark.long
def test_kernel_check_launches_on_the_device_of_its_tensors(gpu, tmp_path):
    from gpu_checks import findings

    command = [sys.executable, "-c", KERNELS, str(FOLDER), str(tmp_path / "findings")]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, _ = findings.read(tmp_path / "findings")
    assert [one["verdict"] for one in seen] == ["PASS", "-", "-"] * 2
