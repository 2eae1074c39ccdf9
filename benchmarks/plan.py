"""Compares the memory that `trl-opsd plan` predicts with what was resident while a student learned on a CPU.

python benchmarks/plan.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trl_opsd.cli.plan.memory import Choice, Load, phases, tracer
from trl_opsd.cli.plan.shapes import shape_of

CLI = Path(__file__).resolve().parent.parent / "tests" / "cli"
CASES = ((1, 16, 16, 0), (4, 64, 192, 0), (4, 64, 192, 1), (8, 128, 384, 0), (8, 128, 384, 1))
"""Rows, tokens of prompt and completion, and whether gradient checkpointing is on."""


def main() -> None:
    """Prints a row for each case."""
    models = [str(CLI / "shapes" / f"measured-{role}.json") for role in ("student", "teacher")]
    student, teacher = map(shape_of, models)
    print("| rows | prompt | completion | checkpointing | predicted, MB | measured, MB | ratio |")
    print("|---|---|---|---|---|---|---|")
    for rows, prompt, length, checkpointing in CASES:
        load = Load(1, rows, prompt, length, False, bool(checkpointing))
        parts = phases(student, teacher, load, Choice("single", "none", rows), tracer(student, load))["student learns"]
        numbers = map(str, (rows, prompt, length, checkpointing))
        program = [sys.executable, str(CLI / "learning_pass.py"), *models, *numbers]
        measured = int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
        predicted = sum(parts.values())
        print(
            f"| {rows} | {prompt} | {length} | {'yes' if checkpointing else 'no'} | {predicted / 1e6:.0f} | "
            f"{measured / 1e6:.0f} | {predicted / measured:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
