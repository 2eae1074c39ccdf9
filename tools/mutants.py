"""Seeds faults in copies of the package, runs the tests that should see each, and prints which survive.

    python tools/mutants.py                   # all of them; about an hour on two cores
    python tools/mutants.py --only teacher    # those whose names contain it
    python tools/mutants.py --list

A mutant replaces one piece of text, which has to stand once in the package, in whichever file: it follows code that
moves, and is an error where the code is gone. A survivor has a reason here, or is a gap in the tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parent.parent
COPIED = ("trl_opsd", "tests", "benchmarks", "examples", "docs", "requirements", "tools", "README.md")
COPIED_FILES = ("LICENSE", "setup.cfg", "pyproject.toml", "CHANGELOG.md", "Makefile", "mkdocs.yml")
SECONDS = 900
"""Time limit of one mutant's tests; to hang is to be seen."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: `old` becomes `new`, and one of `tests` has to fail."""

    name: str
    old: str
    new: str
    tests: str
    """What pytest is given, separated by spaces."""
    survives: str = ""
    """Why it may survive."""


MUTANTS = [Mutant(**one) for one in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]]


def main() -> None:
    """Prints a line for each mutant, and the survivors; exits with an error if one has no reason, or could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of those to run")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    parser.add_argument("--list", action="store_true", help="where each stands, without a run")
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if args.only in mutant.name]
    files = {mutant.name: place(mutant) for mutant in chosen}
    if args.list:
        print(*(f"{mutant.name}: {files[mutant.name]}" for mutant in chosen), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copies.put(copied(Path(folder, str(number))))
        with ThreadPoolExecutor(args.jobs) as pool:
            found = dict(zip(chosen, pool.map(lambda one: outcome(one, files[one.name], copies), chosen), strict=True))
    survived = [mutant for mutant, result in found.items() if result == "survived"]
    broken = [mutant for mutant, result in found.items() if result == "could not run"]
    print(f"{len(chosen) - len(survived) - len(broken)} killed, {len(survived)} survived, {len(broken)} could not run")
    for mutant in survived:
        print(f"survived: {mutant.name}{f' ({mutant.survives})' if mutant.survives else ''}")
    if broken or any(not mutant.survives for mutant in survived):
        raise SystemExit(1)


def place(mutant: Mutant) -> Path:
    """The file of the package that has the text, once."""
    files = [(file, file.read_text().count(mutant.old)) for file in (REPOSITORY / "trl_opsd").rglob("*.py")]
    found = [(file.relative_to(REPOSITORY), count) for file, count in files if count]
    if [count for _, count in found] != [1]:
        raise SystemExit(
            f"{mutant.name}: {mutant.old!r} stands in {found or 'no file'}: expected one place. Mend the table."
        )
    return found[0][0]


def copied(folder: Path) -> Path:
    """A copy of what tests read, whose package they import."""
    folder.mkdir()
    for name in (*COPIED, *COPIED_FILES):
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


def outcome(mutant: Mutant, file: Path, copies: SimpleQueue[Path]) -> str:
    """`"killed"`, `"survived"`, or `"could not run"` where the tests themselves do not start."""
    folder, begun = copies.get(), time.monotonic()
    path = folder / file
    whole = path.read_text()
    path.write_text(whole.replace(mutant.old, mutant.new))
    try:
        code, by = run(mutant.tests.split(), folder)
    finally:
        path.write_text(whole)
        copies.put(folder)
    result = {0: "survived", 1: "killed"}.get(code, "could not run")
    print(f"{result:13} {time.monotonic() - begun:5.0f} s  {mutant.name}  {by}", flush=True)
    return result


def run(tests: list[str], folder: Path) -> tuple[int, str]:
    """pytest's exit status, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or str(REPOSITORY / "build" / "extensions")
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TORCH_EXTENSIONS_DIR": extensions}
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1, "(they did not end)"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, failed[0].split(" - ")[0] if failed else done.stdout[-200:] if done.returncode > 1 else ""


if __name__ == "__main__":
    main()
