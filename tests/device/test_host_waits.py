"""What the host may wait for in an optimizer step, on the simulated device: on a GPU each wait leaves it without work.

A wait between the student's forward pass and the end of its backward pass costs most, as it is one of each micro-batch.
Budgets are what was measured: lower one when a wait is gone.
"""

from __future__ import annotations

from functools import cache

import pytest
from host_waits import KINDS, PARTS, counted
from support import forks

pytestmark = pytest.mark.timeout(forks.SECONDS + 60)

SHORT = ("text", "bytes", "contrast", "groups")
BUDGET = {
    #            results that are read, and copies that block, in the teacher's part of a step of four micro-batches of
    #            two rows, in the student's forward passes, in the losses and backward passes, and in all others
    "text": ((9, 0), (4, 0), (0, 0), (14, 6)),
    "images": ((19, 6), (35, 18), (0, 6), (14, 6)),
    "bytes": ((22, 6), (4, 0), (4, 0), (14, 6)),
    "contrast": ((19, 4), (4, 0), (0, 0), (14, 6)),
    "groups": ((9, 0), (4, 0), (0, 0), (21, 11)),
}
"""In each student's pass transformers looks for packed rows in the positions (1 read), and Qwen2.5-VL's tower
where its images lie. By bytes, which forks are read is known after the states of the text itself."""


@pytest.fixture(scope="module")
def waited(tmp_path_factory):
    """The waits of a case; the short ones share a process."""

    @cache
    def found(names):
        return forks.results("alone", counted, tmp_path_factory.mktemp("waits"), names)[0]

    return lambda case: found(SHORT if case in SHORT else (case,))[case]


@pytest.mark.parametrize("case", [pytest.param(one, marks=[pytest.mark.long] * (one not in SHORT)) for one in KINDS])
def test_host_waits_as_often_as_budgeted(waited, case):
    found = waited(case)
    assert not isinstance(found, str), found
    lines = "\n".join(f"{part}: {line}" for part in PARTS for line in found[part].lines)
    for part, (reads, copies) in zip(PARTS, BUDGET[case], strict=True):
        assert found[part].reads <= reads, lines
        assert found[part].copies <= copies, lines
