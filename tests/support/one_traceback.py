"""Checks the stderr of a launch in which one process failed."""

from __future__ import annotations

import re

DEADLINE = 30
"""Seconds within which all processes end once one has failed; after as many the agent ends those that are left."""


def check_one_traceback(printed: str, ended: float, first: int) -> None:
    """Asserts that the process that failed first prints its traceback, and that both end soon.

    `RAISES <seconds>` in what was printed says when it failed.
    """
    # Anywhere in a line: another process may be drawing a progress bar in it.
    of_first = re.findall(rf"\[rank{first}\]: [^\n]*", printed)
    assert f"[rank{first}]: Traceback (most recent call last):" in of_first
    if raised := re.search(r"^RAISES ([\d.]+)", printed, re.MULTILINE):
        seconds = ended - float(raised[1])
        print(f"\nboth ended after {seconds:.2f} s, {len(of_first)} lines of traceback")
        assert seconds < DEADLINE
