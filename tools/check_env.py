"""Says what the running environment lacks: `pip check`, but for the three CUDA-only packages left out on purpose."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distributions, version

from packaging.requirements import Requirement

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def problems() -> list[str]:
    """One line per requirement of an installed package that is absent or has the wrong version."""
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
                found.append(f"{package.metadata['Name']} wants {requirement}, here is {have}")
    return sorted(set(found))


if __name__ == "__main__":
    raise SystemExit("\n".join(problems()) or None)
