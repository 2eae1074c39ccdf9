"""Compares installed libraries with the bounds of `setup.cfg`, as this package's metadata has them.

To silence the warning: `logging.getLogger("trl_opsd._compat.versions").setLevel("ERROR")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata

from accelerate.logging import get_logger
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

logger = get_logger(__name__)

_EXTRAS = ("", "deepspeed", "report", "server", "vllm")
"""Extras for users; `""` is the package without extras."""


@cache
def bounds() -> dict[str, SpecifierSet]:
    """The supported versions of each library with bounds; empty for a source tree that is not installed."""
    try:
        wanted = [Requirement(line) for line in metadata.requires("trl_opsd") or ()]
    except metadata.PackageNotFoundError:
        return {}
    return {
        one.name: one.specifier
        for one in wanted
        if one.specifier and (one.marker is None or any(one.marker.evaluate({"extra": name}) for name in _EXTRAS))
    }


def installed() -> dict[str, str]:
    """The version of each library of [`bounds`] that is installed."""
    found = {}
    for name in {**bounds(), "vllm": None}:
        # vLLM's build for CPUs is another distribution.
        for build in (name, f"{name}-cpu"):
            try:
                found[name] = metadata.version(build)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def outside(found: Mapping[str, str]) -> list[str]:
    """Descriptions of the libraries that are outside their bounds, from versions by library."""
    return [
        f"{name} {found[name]} (expected {name}{allowed})"
        for name, allowed in bounds().items()
        if name in found and not allowed.contains(found[name], prereleases=True)
    ]


@cache
def warn_of_outside() -> None:
    """Warns once about libraries outside their bounds."""
    if found := outside(installed()):
        logger.warning(
            f"Older or newer than what trl_opsd was tested with: {', '.join(found)}. Install the expected versions: "
            "this package uses private parts of its neighbours, which may have changed."
        )
