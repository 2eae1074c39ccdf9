"""The newest library versions this package was tested with, and a warning about newer ones.

To silence it: `logging.getLogger("trl_opsd.run.versions").setLevel("ERROR")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from accelerate.logging import get_logger
from packaging.version import Version

logger = get_logger(__name__)

TESTED: Mapping[str, str] = {
    "accelerate": "1.15",
    "datasets": "5.2",
    "deepspeed": "0.19",
    "huggingface_hub": "2.4",
    "peft": "0.21",
    "torch": "2.15",
    "transformers": "5.23",
}
"""Versions without the patch number, by distribution; the oldest supported ones, and vLLM's range, are in `setup.cfg`.
"""


def newer_than_tested(installed: Mapping[str, str]) -> list[str]:
    """The installed libraries that are newer than the newest tested version, each with both versions."""
    return [
        f"{name} {installed[name]} (tested up to {tested})"
        for name, tested in TESTED.items()
        if name in installed and Version(installed[name]).release[:2] > Version(tested).release
    ]


def warn_of_newer() -> None:
    """Warns once about installed libraries that are newer than the newest tested version."""
    if newer := newer_than_tested(installed_versions()):
        logger.warning_once(
            f"Newer than what trl_opsd was tested with: {', '.join(newer)}. If something fails unexpectedly, try the "
            "tested versions first."
        )


@cache
def installed_versions() -> dict[str, str]:
    """By distribution; read once, which takes milliseconds."""
    found = {}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
