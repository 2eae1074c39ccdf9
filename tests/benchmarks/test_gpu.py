"""`benchmarks/gpu.py`: its checks pass at toy sizes, one that fails costs itself, and limits are within the budget."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import gpu
import pytest
import torch
from support import forks, simulated_device

from trl_opsd.losses import ForwardKL, fused
from trl_opsd.losses.elementwise import Finish

QUICK = ("ceilings", "losses", "attention", "contrast", "bytes")
ON_CPU = ("loss_speed", "precision", "resume")
ODD = ("is_killed", "hangs", "multiplies")
SLOW = (*ON_CPU, "teacher", "steps", "generation", "pictures", "rollouts")


def test_all_limits_are_within_the_budget():
    assert sum(check.limit for check in gpu.CHECKS.values()) <= gpu.BUDGET - gpu.STARTING


def multiplies(found):
    torch.set_num_threads(4)
    factor = torch.ones(1000, 1000)
    found.equal("sums, by several threads", (factor @ factor).unique().tolist(), [1000.0])


def is_killed(found):
    found.note("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(found):
    found.note("started", subprocess.Popen(["sleep", "600"]).pid)
    time.sleep(600)


def forked(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """The findings of checks, each in a fork of a process that has computed nothing. For such a process."""
    gpu.prepare()
    places = {name: f"{__name__}:{name}" for name in ODD} | {name: one.place for name, one in gpu.EVERY.items()}
    checks = {name: gpu.Check(places[name], 2 if name == "hangs" else 600, "") for name in names}
    return {name: gpu.run(check, "cpu", 600)["findings"] for name, check in checks.items()}


def test_a_check_that_ends_early_costs_its_own_findings_and_leaves_no_process():
    found = forks.results("alone", forked, ODD)[0]
    measured = {name: [(one["verdict"], one["measured"]) for one in each] for name, each in found.items()}
    assert measured["is_killed"] == [("-", 1), ("FAIL", "killed by signal 9, as for lack of host memory")]
    (_, started), ended = measured["hangs"]
    assert ended == ("FAIL", "not done after 2 s")
    assert not Path(f"/proc/{started}/exe").exists()
    assert measured["multiplies"] == [("PASS", [1000.0])]


def on_device(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """The findings of checks on the simulated device. For a process of its own."""
    simulated_device.install()
    os.environ["ACCELERATE_TORCH_DEVICE"] = device = f"{simulated_device.NAME}:0"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            module, _, function = gpu.EVERY[name].place.partition(":")
            getattr(import_module(module), function)(gpu.Findings(Path(folder) / name, device, toy=True))
        return {name: gpu.read(Path(folder) / name)[0] for name in names}


@cache
def seen(how: Callable[..., Any], names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """What checks found, on the CPU or on the simulated device; those of one kind in one call."""
    return forks.results("alone", how, names)[0]


@pytest.mark.timeout(forks.SECONDS + 60)
@pytest.mark.parametrize(
    ("how", "names", "name"),
    [
        *[(on_device, QUICK, name) for name in QUICK],
        *[(forked, ON_CPU, name) for name in ON_CPU],
        pytest.param(forked, ("compiled",), "compiled", marks=pytest.mark.long),
        *[pytest.param(on_device, SLOW, name, marks=pytest.mark.long) for name in SLOW],
    ],
)
def test_a_check_at_toy_size_passes(how, names, name):
    """On a simulated accelerator, else its first run on a GPU would end where it breaks; or on the CPU."""
    found = seen(how, names)[name]
    assert len(found) > 2
    assert not [one for one in found if one["verdict"] == "FAIL"]


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    called = MagicMock()
    monkeypatch.setattr(torch.accelerator, "device_index", called.device)
    for name in ("_rows", "_targets"):
        monkeypatch.setattr(fused, name, called.kernel)
    tile, finishes = torch.zeros(2, 64), [Finish(None, None)] * 2
    fused.fused_(ForwardKL(), None, finishes, tile, tile, None, None, tile)
    fused.fused_target_(finishes, [tile, tile], [(1.0, None)])
    assert called.device.call_args_list == [call(tile.device.index)] * 2
    launch = ["kernel.__getitem__", "kernel.__getitem__()"]
    assert [one[0] for one in called.mock_calls] == ["device", "device().__enter__", *launch, "device().__exit__"] * 2
