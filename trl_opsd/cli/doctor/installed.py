"""Checks installed versions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from trl_opsd.cli.doctor.verdicts import Doubt
from trl_opsd.run.versions import installed_versions, newer_than_tested


def versions() -> str:
    """Libraries are neither older than what this package asks for nor newer than what it was tested with."""
    outside = [*_outside(), *newer_than_tested(installed_versions())]
    if outside:
        raise Doubt(f"Outside what was tested: {', '.join(outside)}.")
    return ", ".join(f"{name} {number}" for name, number in installed_versions().items())


def _outside() -> Iterator[str]:
    for one in map(Requirement, requires("trl_opsd") or ()):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(one.name)
        except PackageNotFoundError:
            yield f"{one.name} is not installed"
            continue
        if not one.specifier.contains(found, prereleases=True):
            yield f"{one.name} {found} (asked for: {one.specifier})"
