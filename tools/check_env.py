"""Prints the hardware and torch build, and checks the environment as `pip check` does.

Three packages are left out on purpose: they may be available as CUDA builds only.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def problems() -> list[str]:
    """One line for each requirement of an installed package that is missing or has the wrong version."""
    found = []
    for package in distributions():
        for requirement in map(Requirement, package.requires or []):
            if requirement.name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue
            try:
                have = version(requirement.name)
            except PackageNotFoundError:
                have = None
            if have is None or not requirement.specifier.contains(have, prereleases=True):
                found.append(f"{package.metadata['Name']} requires {requirement}, installed is {have}")
    return sorted(set(found))


FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16")
"""Instruction sets that affect how products are rounded, on x86 and on ARM."""


def machine() -> str:
    """The hardware and torch build that a failing test may depend on, in one line."""
    import torch

    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = set(re.findall(r"[\w]+", " ".join(re.findall(r"(?:flags|Features)\s*:(.*)", cpuinfo))))
    name = re.search(r"model name\s*: (.*)", cpuinfo)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = (
        name[1] if name else platform.processor() or platform.machine(),
        " ".join(one for one in FEATURES if one in flags) or "no known features",
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory:.0f} GiB",
        f"torch {torch.__version__} uses {torch.backends.cpu.get_cpu_capability()}",
    )
    return "; ".join(parts)


if __name__ == "__main__":
    print(machine())
    raise SystemExit("\n".join(problems()) or None)
