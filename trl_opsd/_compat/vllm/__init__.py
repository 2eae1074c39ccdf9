"""The parts of vLLM that this package uses; refuses a missing or unsupported version with a clear message."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings

from packaging.specifiers import SpecifierSet

from trl_opsd._compat.trl import is_vllm_available
from trl_opsd._compat.versions import bounds, installed

logger = logging.getLogger(__name__)


def _check_version() -> None:
    supported, found = bounds().get("vllm", SpecifierSet()), installed().get("vllm")
    how_to_install = f'`pip install "vllm{supported}"`'
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"`use_vllm=True` needs vLLM, which is not installed: {how_to_install}.")
    if found is not None and not supported.contains(found, prereleases=True):
        raise ValueError(f"vLLM {found} is installed; expected vllm{supported}: {how_to_install}.")
    # TRL's own warning about the version is filtered on import, and repeated here, where vLLM is chosen.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        is_vllm_available()
    for one in said if os.environ.get("RANK", "0") == "0" else ():
        logger.warning(f"{one.message} trl_opsd itself was tested with vllm{supported}.")


_check_version()
