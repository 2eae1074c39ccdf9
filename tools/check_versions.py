"""Tests the wheel in two environments: what `pip install` takes today, and the lower bounds of `setup.cfg`.

Before a release: `make versions`, or `make versions ONLY=lowest`. Needs a C++ compiler. Wheel and environments lie in
a temporary folder (`TMPDIR`) and are deleted. Where an index has torch for CUDA only, each environment takes minutes
and 8 GB; `PIP_EXTRA_INDEX_URL` may name one with CPU builds. What is newer than `TESTED` in `trl_opsd/run/versions.py`
and passes goes in there. vLLM asks for a torch of its own: CONTRIBUTING.md says with which it was run.
"""

from __future__ import annotations

import argparse
import configparser
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from check_wheel import REPOSITORY, WITH_LIBRARIES, build
from packaging.requirements import Requirement

TESTS = (
    "tests/contract",
    "tests/distributed/test_strategies.py",
    "tests/losses",
    "tests/rollout/test_hf.py",
    "tests/rollout/test_hf_decode.py",
    "tests/rollout/test_recomputed.py",
    "tests/teacher",
    "tests/test_precision.py",
    "tests/test_readme.py",
    "tests/test_trainer.py",
    "tests/test_versions.py",
)
FOR_TESTS = ("hypothesis", "jmespath", "ninja", "pillow", "pytest", "pytest-timeout", "pytest-xdist")
BESIDE = ("tests", "examples", "docs", "requirements", "tools", "README.md", "setup.cfg")
"""What tests read. The package is not among it, so they import the wheel."""
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Prints the versions and the counts of each set; ends with an error where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["newest", "lowest"], help="one set; without it both")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        copy_what_tests_read(Path(folder, "beside"))
        pins = {"newest": [], "lowest": lower_bounds()}
        wanted = [only] if only else list(pins)
        found = {name: outcome(name, Path(folder), wheel, pins[name]) for name in wanted}
    print(*(f"{name}: {counts}" for name, (_, counts) in found.items()), sep="\n")
    if not all(passed for passed, _ in found.values()):
        raise SystemExit(1)


def lower_bounds() -> list[str]:
    """`name==version` of each lower bound, DeepSpeed's among them.

    Raises:
        ValueError: A requirement has none.
    """
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    lines = f"{config['options']['install_requires']}\n{config['options.extras_require']['deepspeed']}"
    wanted = [Requirement(line) for line in lines.split()]
    lowest = {one.name: [bound.version for bound in one.specifier if bound.operator == ">="] for one in wanted}
    if unbound := [name for name, versions in lowest.items() if not versions]:
        raise ValueError(f"setup.cfg: {unbound} without a lower bound, which could not be tested: add `>=`.")
    return [f"{name}=={version}" for name, (version, *_) in lowest.items()]


def copy_what_tests_read(folder: Path) -> None:
    """Copies `BESIDE`, without what earlier runs have left."""
    folder.mkdir()
    for name in BESIDE:
        if (source := REPOSITORY / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)


def outcome(name: str, folder: Path, wheel: Path, pins: list[str]) -> tuple[bool, str]:
    """Whether all went well in one environment, and pytest's counts or what failed before them."""
    environment, start = folder / name, time.monotonic()

    def say(what: str) -> None:
        print(f"== {name}, {time.monotonic() - start:.0f} s: {what}", flush=True)

    say("installing " + (" ".join(pins) or "what resolves"))
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    try:
        call(*pip, "install", "-qq", *pins, *FOR_TESTS, f"{wheel}[deepspeed]")
        call(*pip, "list")
        say("importing each library by itself, and everything from the wheel")
        # As a script may, before it imports this package, which may mend an import of theirs.
        for library in map(Requirement, lower_bounds()):
            call(python, "-I", "-c", f"import {library.name}")
        call(python, "-I", "-c", WITH_LIBRARIES)
    except subprocess.CalledProcessError as error:
        return False, f"failed: {' '.join(map(str, error.cmd))[:200]}"
    say("testing")
    passed, counts = run_tests(python, folder / "beside")
    say(counts)
    shutil.rmtree(environment)
    return passed, counts


def call(*command: object) -> None:
    """Runs a command with its output shown, away from the repository."""
    subprocess.run([*map(str, command)], check=True, cwd=tempfile.gettempdir())


def run_tests(python: Path, beside: Path) -> tuple[bool, str]:
    """Whether the tests pass, and pytest's last line; files side by side, as `make test` has them."""
    command = [python, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", *TESTS]
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # ninja and accelerate are started by name
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET | {"PATH": path}
    last = ""
    with subprocess.Popen(command, cwd=beside, env=env, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    return tests.returncode == 0, last


if __name__ == "__main__":
    sys.exit(main())
