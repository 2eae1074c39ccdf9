"""Trainings on the simulated device have the losses and weights of the CPU; what the host waits for stays in a budget.

A branch that only an accelerator takes fails here if it cannot run. On a GPU each wait leaves it without work; one
between the student's forward pass and the end of its backward pass costs most, as it is one of each micro-batch.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from device_cases import CASES, KINDS, PARTS, counted, outcomes
from support import forks

from trl_opsd.types.targets import Keeper

pytestmark = pytest.mark.timeout(forks.SECONDS + 60)


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
    keeper = Keeper(torch.ones(2, 3, device=DEVICE), "accelerator")
    for row in (1, 0):
        keeper.put([row], cpu.view(1, 3, 2) * row)
    states = [one.hidden for one in keeper.targets().rows]
    found["at once"] = keeper._block.is_pinned(), states[0].untyped_storage() == states[1].untyped_storage()
    found["states"] = [(isinstance(one, OnDevice), one.sum().item()) for one in states]
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
        "at once": (True, True),
        "states": [(True, 0.0), (True, 6.0)],
    }


# ---- Trainings -------------------------------------------------------------------------------------------------------


SHORT = ("contrast, host memory", "bytes, rewards, host memory", "resumed")
TOLERANCE = 1e-5
"""A tenth of one step of AdamW at a learning rate of 1e-4."""
HALF = 1e-3
"""Autocast on the CPU rounds elsewhere."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The outcomes of a case on both; the short ones share a process, and all others of a table."""
    folder = tmp_path_factory.mktemp("device")

    @cache
    def found(kind):
        names = [name for name in CASES if kind_of(name) == kind]
        return [forks.results("alone", outcomes, folder / kind, names, device)[0] for device in (False, True)]

    return lambda name: [each[name] for each in found(kind_of(name))]


def kind_of(name):
    return "short" if name in SHORT else name.partition(":")[0] if ":" in name else "others"


@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in SHORT else pytest.mark.long) for one in CASES])
def test_training_on_an_accelerator_is_that_of_the_cpu(trained, name):
    on_cpu, on_device = trained(name)
    assert not isinstance(on_cpu, str), on_cpu
    assert not isinstance(on_device, str), on_device
    np.testing.assert_allclose(on_device, on_cpu, rtol=0, atol=HALF if name == "bf16" else TOLERANCE)


# ---- Waits -----------------------------------------------------------------------------------------------------------


COUNTED = ("text", "bytes", "contrast", "groups")
BUDGET = {
    #            results that are read, and copies that block, in the teacher's part of a step of four micro-batches of
    #            two rows, in the student's forward passes, in the losses and backward passes, and in all others
    "text": ((7, 0), (4, 0), (0, 0), (8, 1)),
    "images": ((17, 6), (35, 18), (0, 6), (8, 1)),
    "generation": ((17, 6), (35, 18), (0, 6), (141, 11)),
    "bytes": ((15, 0), (4, 0), (4, 0), (8, 1)),
    "contrast": ((16, 0), (4, 0), (0, 0), (8, 1)),
    "groups": ((7, 0), (4, 0), (0, 0), (12, 5)),
}
"""In each student's pass transformers looks for packed rows in the positions (1 read), and Qwen2.5-VL's tower
where its images lie. A token that is generated needs 2 reads and no copy. By bytes, which forks are read is known
after the states of the text itself."""


@pytest.fixture(scope="module")
def waited(tmp_path_factory):
    """The waits of a case in a step; the short ones share a process."""

    @cache
    def found(names):
        return forks.results("alone", counted, tmp_path_factory.mktemp("waits"), names)[0]

    return lambda case: found(COUNTED if case in COUNTED else (case,))[case]


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.long] * (one not in COUNTED)) for one in KINDS])
def test_host_waits_as_often_as_budgeted(waited, case):
    found = waited(case)
    assert not isinstance(found, str), found
    for part, budget in zip(PARTS, BUDGET[case], strict=True):
        for each, most in zip(found, budget, strict=True):
            lines = {line: number for (of, line), number in each.items() if of == part}
            assert sum(lines.values()) <= most, (part, lines)
