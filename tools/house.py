"""Prints the size of the package as a reader meets it: lines, files, classes, and what one optimizer step passes.

python tools/house.py            # twenty seconds; part of `make check`, so that a house that grows is seen
python tools/house.py --tree     # every file with its lines and its first sentence
"""

from __future__ import annotations

import ast
import dataclasses
import io
import itertools
import re
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "trl_opsd"
TOOLS = ("cli", "report")
"""Commands and the page of a report: nothing that trains imports them."""
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]


def main() -> None:
    """A row for each measure: what it is now, and its goal."""
    sources = {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    lines = {name: source.count("\n") for name, source in sources.items()}
    if "--tree" in sys.argv:
        for name, source in sources.items():
            sentence = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            print(f"{lines[name]:5}  {name:42} {sentence}")
        return
    core = sum(count for name, count in lines.items() if not name.startswith(TOOLS))
    comments = 100 * sum(map(narrative, sources.values())) / sum(lines.values())

    begun = time.process_time()
    from trl_opsd import OPSDConfig, OPSDTrainer
    from trl_opsd._compat.trl import DistillationConfig

    ours = {name for name in sys.modules if name.startswith("trl_opsd")}
    imported = time.process_time()
    trainer, build_seconds = toy(OPSDTrainer)
    passed = files_called(trainer)
    known = [
        sum(bool(re.search(rf"\b{option.name}\b", source)) for source in sources.values())
        for option in dataclasses.fields(OPSDConfig)
        # of ours, those of methods too; names without an underscore are words of English as well
        if option.name not in DistillationConfig.__dataclass_fields__ and "_" in option.name
    ]
    bodies = [body for source in sources.values() for body in lines_of_functions(ast.parse(source))]
    classes = [cls for cls in OPSDTrainer.__mro__ if cls.__module__.startswith("trl_opsd")]
    moves = sum(a != b for a, b in itertools.pairwise(passed))
    rows = (
        ("lines, tools apart", core, "22,500"),
        ("lines", sum(lines.values()), "26,000"),
        ("files", len(sources), "140"),
        ("classes of ours in the trainer's MRO", len(classes), "6"),
        ("files that one optimizer step passes", len(set(passed)), "32"),
        ("moves between files in it", moves, "150"),
        ("files that know an option: median, largest", f"{median(known):g}, {max(known)}", "3, 6"),
        (
            "functions of at most two lines; median body",
            f"{sum(one < 3 for one in bodies)}, {median(bodies):g}",
            "400, 8",
        ),
        ("comments, % of lines", f"{comments:.1f}", "4 or more"),
        ("modules that the trainer's import loads", len(ours), "90"),
        ("processor seconds: import, a toy's trainer", f"{imported - begun:.1f}, {build_seconds:.2f}", ""),
    )
    for name, value, goal in rows:
        print(f"{name:45} {f'{value:,}' if isinstance(value, int) else value:>10}   {goal and f'goal {goal}'}")


def lines_of_functions(tree: ast.AST) -> Iterator[int]:
    """The lines of each function's body, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def narrative(source: str) -> int:
    """Comments that a reader reads, not a checker."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type == tokenize.COMMENT and not re.match(r"# *(type:|noqa|mypy|ruff|fmt|!)", token.string)
        for token in tokens
    )


def toy(trainer_class: Callable[..., Any]) -> tuple[Any, float]:
    """A trainer of toys with a fixed rollout, and the processor seconds that it took to build."""
    from support import tiny

    from trl_opsd import FixedRollout

    words = tiny.tokenizer()
    student, teacher = tiny.qwen2(32), tiny.qwen2(48, seed=1)
    args = tiny.config(Path(tempfile.mkdtemp()), max_steps=2)
    begun = time.process_time()
    trainer = trainer_class(
        model=student,
        teacher_model=teacher,
        args=args,
        train_dataset=tiny.rows(),
        processing_class=words,
        rollout=FixedRollout(tiny.recorded(words)),
    )
    return trainer, time.process_time() - begun


def files_called(trainer: Any) -> list[str]:
    """The files of the functions that the second step calls, in their order."""
    from transformers import TrainerCallback

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

    trainer.add_callback(SecondStep())
    trainer.train()
    return called


if __name__ == "__main__":
    main()
