"""Tests the wheel in two environments: the newest libraries that resolve, and the lower bounds of `setup.cfg`.

Before a release: `make versions`. Takes two environments (the older torch comes with its CUDA packages, several GB) and
some minutes. What is newer than `TESTED` in `trl_opsd/versions.py` and passes here goes in there.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from check_wheel import REPOSITORY, build
from packaging.requirements import Requirement

TESTS = (
    "tests/contract",
    "tests/losses",
    "tests/rollout/test_hf.py",
    "tests/rollout/test_hf_decode.py",
    "tests/rollout/test_recomputed.py",
    "tests/test_readme.py",
    "tests/test_trainer.py",
    "tests/test_versions.py",
)
FOR_TESTS = ("hypothesis", "jmespath", "pillow", "pytest", "pytest-timeout", "pytest-xdist")


def main() -> None:
    """Prints the versions and the counts of both; ends with an error where a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        torch = (REPOSITORY / "requirements" / "torch.txt").read_text().splitlines()[-1]
        failed = [
            name
            for name, pins in {"newest": [torch], "lowest": lower_bounds()}.items()
            if not passes(Path(folder, name), wheel, pins)
        ]
    if failed:
        raise SystemExit(f"failed with: {', '.join(failed)}")


def lower_bounds() -> list[str]:
    """`name==version` of each lower bound, torch first."""
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    wanted = map(Requirement, config["options"]["install_requires"].split())
    pins = [f"{one.name}=={bound.version}" for one in wanted for bound in one.specifier if bound.operator == ">="]
    return sorted(pins, key=lambda pin: not pin.startswith("torch=="))


def passes(environment: Path, wheel: Path, pins: list[str]) -> bool:
    """Whether the tests pass with the wheel and these versions."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    # torch alone first: an index may serve this version as a CPU build, and others only with CUDA.
    for packages in (pins[:1], [*pins, *FOR_TESTS, wheel]):
        subprocess.run([python, "-m", "pip", "install", "-q", *map(str, packages)], check=True)
    subprocess.run([python, "-m", "pip", "list"], check=True)
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Not `python -m pytest`, which would import the package from here.
    done = subprocess.run([environment / "bin" / "pytest", "-q", *TESTS], cwd=REPOSITORY, env=quiet)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
