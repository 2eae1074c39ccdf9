"""The parts of vLLM that this package uses; refuses a missing or unsupported version with a clear message."""

from __future__ import annotations

import importlib.util

from packaging.specifiers import SpecifierSet

from trl_opsd._compat.versions import bounds, installed


def _check_version() -> None:
    supported, found = bounds().get("vllm", SpecifierSet()), installed().get("vllm")
    how_to_install = f'`pip install "vllm{supported}"`'
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"`use_vllm=True` needs vLLM, which is not installed: {how_to_install}.")
    if found is not None and not supported.contains(found, prereleases=True):
        raise ValueError(f"vLLM {found} is installed; expected vllm{supported}: {how_to_install}.")


_check_version()
