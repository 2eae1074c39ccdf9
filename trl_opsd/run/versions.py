"""The newest libraries this package was run with, and a word about those that are newer.

Silenced as any log is: `logging.getLogger("trl_opsd.run.versions").setLevel("ERROR")`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""Releases without their patch, by distribution; the oldest stand in `setup.cfg`, and vLLM's with its engine."""


def newer_than_tested(installed: Mapping[str, str]) -> list[str]:
    """The installed libraries whose release is newer than what was tested, each with both versions."""
    return [
        f"{name} {installed[name]} (tested up to {tested})"
        for name, tested in TESTED.items()
        if name in installed and Version(installed[name]).release[:2] > Version(tested).release
    ]


def warn_of_newer() -> None:
    """Says once which of the installed libraries are newer than what was tested."""
    if newer := newer_than_tested(_installed()):
        logger.warning_once(
            f"Newer than what trl_opsd was tested with: {', '.join(newer)}. If something fails that should not, try "
            "the tested ones first."
        )


def _installed() -> dict[str, str]:
    found = {}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
