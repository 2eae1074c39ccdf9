"""Holds the package to its limits: lines, files, options, `raise` statements, tests, words, and what a step passes.

python tools/house.py            # twenty seconds; part of `make check`, which fails above a limit
python tools/house.py --lower    # lowers each limit in tools/limits.json to what was reached; none is ever raised
python tools/house.py --tree     # every file with its lines and its first sentence
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "trl_opsd"
LIMITS = Path(__file__).with_name("limits.json")
GENERATED = {"docs/reference.md"}
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]


def main() -> None:
    """A row for each measure, beside its limit; exits with 1 if one is above it."""
    if "--tree" in sys.argv:
        for name, source in sources(PACKAGE).items():
            sentence = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            print(f"{source.count(chr(10)):5}  {name:42} {sentence}")
        return
    limits, found = json.loads(LIMITS.read_text()), measured()
    above = {name for name, value in found.items() if value > limits[name]}
    for name, value in found.items():
        print(f"{name:40} {value:>8,}   limit {limits[name]:>8,}{'   ABOVE' if name in above else ''}")
    if "--lower" in sys.argv:
        limits = {name: min(value, limits[name]) for name, value in found.items()}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n")
    if above:
        sys.exit("The house is above a limit of tools/limits.json, and limits are never raised: take something away.")


def measured() -> dict[str, int]:
    """The measures by their names in tools/limits.json."""
    package, tests = sources(PACKAGE), sources(REPOSITORY / "tests")
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    passed = files_of_a_step()
    return {
        "lines of the package": lines(package),
        "files of the package": len(package),
        "lines of tests": lines(tests),
        "files of tests": len(tests),
        "options of our own": own_options(),
        "raise statements": sum(isinstance(node, ast.Raise) for one in package.values() for node in nodes(one)),
        "words of README and docs": sum(len(page.read_text().split()) for page in pages if not is_generated(page)),
        "files that a plain step passes": len(set(passed)),
        "moves between files in a plain step": sum(a != b for a, b in itertools.pairwise(passed)),
    }


def sources(folder: Path) -> dict[str, str]:
    """The source of each Python file below a folder, by its path within it."""
    return {file.relative_to(folder).as_posix(): file.read_text() for file in sorted(folder.rglob("*.py"))}


def lines(of: dict[str, str]) -> int:
    return sum(source.count("\n") for source in of.values())


def nodes(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


def is_generated(page: Path) -> bool:
    return page.relative_to(REPOSITORY).as_posix() in GENERATED


def own_options() -> int:
    """Fields of `OPSDConfig` that TRL's config does not have."""
    from trl_opsd import OPSDConfig
    from trl_opsd._compat.trl import DistillationConfig

    theirs = {one.name for one in fields(DistillationConfig)}
    return sum(one.name not in theirs for one in fields(OPSDConfig))


def files_of_a_step() -> list[str]:
    """The files of the functions that the second step of a toy calls, in their order."""
    from support import tiny
    from transformers import TrainerCallback

    from trl_opsd import FixedRollout, OPSDTrainer

    called: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            called.append(frame.f_code.co_filename)

    class SecondStep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                sys.setprofile(note)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            sys.setprofile(None)

    words = tiny.tokenizer()
    trainer = OPSDTrainer(
        model=tiny.qwen2(32),
        teacher_model=tiny.qwen2(48, seed=1),
        args=tiny.config(Path(tempfile.mkdtemp()), max_steps=2),
        train_dataset=tiny.rows(),
        processing_class=words,
        rollout=FixedRollout(tiny.recorded(words)),
    )
    trainer.add_callback(SecondStep())
    trainer.train()
    return called


if __name__ == "__main__":
    main()
