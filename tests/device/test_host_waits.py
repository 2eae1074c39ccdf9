"""What the host may wait for in an optimizer step, on the simulated device: on a GPU each wait leaves it without work.

Between the student's forward pass and the end of its backward pass nothing should; before it, each wait is one of all
micro-batches. A budget that is not used up fails too, so that it stays what is measured: lower it.
"""

from __future__ import annotations

from functools import cache

import forks
import pytest
from host_waits import KINDS, PARTS, counted

pytestmark = pytest.mark.timeout(forks.SECONDS + 60)

SHORT = ("text", "bytes", "contrast", "groups")
BUDGET = {
    #            results that are read, and copies that block, in the teacher's part of a step of four micro-batches of
    #            two rows, in the student's forward passes, in the losses and backward passes, and in all others
    "text": ((9, 0), (4, 0), (0, 0), (23, 9)),
    "images": ((83, 7), (89, 21), (0, 6), (23, 9)),
    "bytes": ((18, 13), (4, 0), (0, 28), (23, 9)),
    "contrast": ((19, 4), (4, 0), (0, 0), (23, 9)),
    "groups": ((9, 0), (4, 0), (0, 0), (30, 14)),
}
"""Of those in the student's passes and losses, which are once per micro-batch or more: transformers looks for packed
rows in the positions (1 read), Qwen2.5-VL places its images (15 reads, 5 copies), and the loss by bytes copies the
indices of each tile. TRL's own metrics are 9 reads and 7 copies of the rest."""


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
    lines = "\n".join(f"{part}: {line}" for part in PARTS for line in found[part].lines)
    assert tuple((found[part].reads, found[part].copies) for part in PARTS) == BUDGET[case], lines
