"""`benchmarks/gpu.py`: its checks pass at toy sizes, and all limits are within the budget."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forks, simulated_device

from trl_opsd.losses import ForwardKL, fused
from trl_opsd.losses.elementwise import Finish

DEVICE = f"{simulated_device.NAME}:0"
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK = ("ceilings", "losses", "attention", "contrast", "bytes")
ON_CPU = ("loss_speed", "precision", "resume")
SLOW = (*ON_CPU, "teacher", "steps", "pictures", "rollouts")


def findings_of(name: str, path: Path, device: str) -> list[dict[str, Any]]:
    from gpu_checks import CHECKS, LATER, findings

    module, _, function = {**CHECKS, **LATER}[name].place.partition(":")
    getattr(importlib.import_module(module), function)(findings.Findings(path, device, toy=True))
    return findings.read(path)[0]


def test_all_limits_are_within_the_budget(load):
    gpu = load("gpu")
    assert sum(check.limit for check in gpu.CHECKS.values()) <= gpu.BUDGET


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
    """What checks found on the simulated device, in one process."""
    return cache(lambda names: forks.results("alone", on_device, tmp_path_factory.mktemp("findings"), names)[0])


@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize(
    ("name", "together"),
    [
        *[(name, QUICK) for name in QUICK],
        *[(name, None) for name in ON_CPU],
        *[pytest.param(name, SLOW, marks=pytest.mark.long) for name in SLOW],
    ],
)
def test_a_check_at_toy_size_passes(load, simulated, tmp_path, name, together):
    """On a simulated accelerator, else its first run on a GPU would end where it breaks; or on the CPU."""
    load("gpu")
    seen = findings_of(name, tmp_path / "findings", "cpu") if together is None else simulated(together)[name]
    assert not isinstance(seen, str), seen
    assert len(seen) > 2
    assert not [one for one in seen if one["verdict"] == "FAIL"]


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    current, launched = [], []

    class Launches:
        def __getitem__(self, grid):
            return lambda *args, **more: launched.append(current[-1:])

    @contextmanager
    def device_index(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    for name in ("_rows", "_targets"):
        monkeypatch.setattr(fused, name, Launches())
    tile, finishes = torch.zeros(2, 64), [Finish(None, None)] * 2
    fused.fused_(ForwardKL(), None, finishes, tile, tile, None, None, tile)
    fused.fused_target_(finishes, [tile, tile], [(1.0, None)])
    assert launched == [[tile.device.index]] * 2
