"""Checks the stderr of a launch in which one process failed."""

from __future__ import annotations

import re

DEADLINE = 30
"""Seconds within which all processes end once one has failed; after as many the agent ends those that are left."""


def check_one_traceback(printed: str, ended: float, first: int) -> None:
    """Asserts that one process prints one traceback, the other at most one line, and that both end soon.

    Args:
        printed (`str`):
            The stderr of all; `RAISES <seconds>` in it says when the first one failed.
        ended (`float`):
            When all had ended.
        first (`int`):
            Rank of the process that failed first.
    """
    # Anywhere in a line: another process may be drawing a progress bar in it.
    of_ranks = re.findall(r"\[rank\d\]: [^\n]*", printed)
    assert [line for line in of_ranks if "Traceback" in line] == [f"[rank{first}]: Traceback (most recent call last):"]
    assert all(line.startswith(f"[rank{first}]") for line in of_ranks)
    # None if the agent ended the other process before that one noticed.
    assert printed.count(f"Rank {1 - first} ends because rank {first} failed first; see its error.") <= 1
    assert "Connection closed" not in printed
    if raised := re.search(r"^RAISES ([\d.]+)", printed, re.MULTILINE):
        seconds = ended - float(raised[1])
        print(f"\nboth ended after {seconds:.2f} s, {len(of_ranks)} lines of traceback")
        assert seconds < DEADLINE
