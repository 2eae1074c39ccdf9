"""Renames each borrowed name in a copy of its library, and reports whether the contract test notices.

The test reads syntax, so a copy in memory is enough. `--really N` also writes N copies of trl to disk, each with one
name renamed, and runs the test itself with the copy in place of trl.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "tests" / "contract"
sys.path.insert(0, str(CONTRACT))

import breaches  # noqa: E402
import theirs  # noqa: E402
from borrowed import Owner  # noqa: E402


def in_memory(owner: Owner, name: str) -> str | None:
    """The error of the contract if a library's name is renamed in memory; `None` if it notices nothing."""
    return breaches.breach(owner, name, theirs.Sources(renamed=(owner.package, name)))


def really(owner: Owner, name: str) -> str | None:
    """The same with a renamed copy on disk, by running the test itself."""
    installed = theirs.folder_of(owner.package)
    assert installed is not None, f"{owner.package} is installed"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / owner.package
        shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file in copy.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            file.write_text(theirs.with_name_changed(text, owner.package, name), encoding="utf-8")
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", CONTRACT / "test_borrowed.py"]
        run = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    errors = [line[1:].strip() for line in (run.stdout + run.stderr).splitlines() if line.startswith("E ")]
    # The contract's message; or Python's own, with other quotes, if the name is already needed at import.
    named = [one for one in errors if f"`{name}`" in one.replace("'", "`")]
    return next(iter(named), None) if run.returncode else None


def main() -> int:
    """Prints the table and returns the number of names that were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--really", type=int, default=0, metavar="N", help="names of trl to rename on disk, drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    options = parser.parse_args()

    rows = [(owner, name) for owner in breaches.INSTALLED for name in owner.names]
    missed = sum([_report(owner, name, in_memory(owner, name)) for owner, name in rows])
    print(f"{len(rows)} names, {len(rows) - missed} caught, {missed} missed")

    of_trl = [(owner, name) for owner, name in rows if owner.package == "trl"]
    drawn = random.Random(options.seed).sample(of_trl, options.really)
    missed_on_disk = sum([_report(owner, name, really(owner, name)) for owner, name in drawn])
    if drawn:
        print(f"{len(drawn)} names on disk, {len(drawn) - missed_on_disk} caught, {missed_on_disk} missed")
    return missed + missed_on_disk


def _report(owner: Owner, name: str, said: str | None) -> bool:
    is_missed = said is None or f"`{name}` of {owner.title}" not in said
    print("missed" if is_missed else "caught", f"{owner.package}: {owner.title}.{name}", said or "", flush=True)
    return is_missed


if __name__ == "__main__":
    raise SystemExit(main())
