"""Checks installed versions."""

from __future__ import annotations

from trl_opsd._compat.versions import installed, outside
from trl_opsd.cli.doctor.verdicts import Doubt


def versions() -> str:
    """Libraries are within the bounds of `setup.cfg`, whose ends were tested."""
    if found := outside(installed()):
        raise Doubt(f"Outside what was tested: {', '.join(found)}.")
    return ", ".join(f"{name} {number}" for name, number in installed().items())
