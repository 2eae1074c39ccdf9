"""Trainings on the simulated device: none mixes devices, and each has the losses and weights of the CPU.

A branch that only an accelerator takes fails here if it cannot run. Waits: `test_host_waits.py`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from device_cases import CASES, outcomes
from support import forks

pytestmark = pytest.mark.timeout(forks.SECONDS + 60)
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
