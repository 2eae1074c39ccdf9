"""Prints the memory that some checks of a tiny pair add to a process at most, and the estimate, in bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from training_peak import resident
from transformers import AutoConfig

from trl_opsd.cli.doctor import checks
from trl_opsd.cli.doctor.pair import LIBRARIES, load_pair, shrunk, tiny_bytes


def main(student: str, teacher: str) -> None:
    """The checks that take most, after a first use of what they import."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on, a new peak
    pair = load_pair(student, teacher, tiny=True)
    for check in (checks.equals_reference, checks.same_in_parts, checks.half_precision):
        check(pair)
    estimated = tiny_bytes(*(shrunk(AutoConfig.from_pretrained(one)) for one in (student, teacher)))
    print(resident("VmHWM") - before, estimated - LIBRARIES)


if __name__ == "__main__":
    main(*sys.argv[1:])
