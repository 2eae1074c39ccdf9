"""The simulated device itself: what a GPU refuses it refuses, and waits and bytes are counted."""

from __future__ import annotations

import pytest
import torch
from support import forks


def seen() -> dict[str, object]:
    from support import simulated_device
    from support.simulated_device import DEVICE, OnDevice, waits

    simulated_device.install()
    found, here, cpu = dict[str, object](), torch.arange(6.0, device=DEVICE), torch.ones(6)
    for name, mix in {
        "add": lambda: here + cpu,
        "cat": lambda: torch.cat([here, cpu]),
        "index": lambda: cpu[here.long()],
    }.items():
        with pytest.raises(RuntimeError, match="same device"):
            mix()
        found[name] = "refused"
    with waits.during("test"):
        _ = here.sum().item(), here.tolist(), here[here > 2], torch.tensor(1.0, device=DEVICE), cpu.to(DEVICE)
        found["waits"] = waits.reads.total(), waits.copies.total()
        _ = (
            cpu.to(DEVICE, non_blocking=True),
            here + 1,
            here.new_full((), 3),
            torch.zeros(3, device=DEVICE),
            here * cpu[0],
        )
        found["none more"] = waits.reads.total(), waits.copies.total()
    before = torch.accelerator.memory_allocated()
    large = torch.zeros(1000, device=DEVICE)
    view = large[10:]
    del large
    found["bytes"] = torch.accelerator.memory_allocated() - before
    del view
    found["bytes after"] = torch.accelerator.memory_allocated() - before
    weight = torch.nn.Parameter(cpu)
    weight.data = here
    found["moved"] = isinstance(weight, OnDevice), isinstance(weight, torch.nn.Parameter), weight.tolist()
    return found


@pytest.mark.quick
def test_device_refuses_and_counts_what_a_gpu_does():
    assert forks.results("alone", seen)[0] == {
        **dict.fromkeys(("add", "cat", "index"), "refused"),
        "waits": (3, 2),
        "none more": (3, 2),
        "bytes": 4000,
        "bytes after": 0,
        "moved": (True, True, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    }
