"""Tries `trl-opsd doctor` and `trl-opsd plan` on toys of every family; prints the results.

    python tools/first_look.py                 # all families, a quarter of an hour
    python tools/first_look.py gemma4 mamba    # some

Each family is saved as student and teacher with random weights, and examined in a process of its own. A pair that the
trainer refuses fails in `doctor` with the trainer's words; a traceback is a mistake, and the exit status counts those.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import toys
from families import VOCABULARY, isolated, make_tokenizer
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support import vision_language

TRIALS = {
    "doctor": ["--json"],
    "plan": ["--json", "--batch", "2", "--prompt", "24", "--length", "24", "--gpu-memory", "1"],
}


def saved(family: str, folder: str) -> None:
    """A random student, with a tokenizer."""
    if family in vision_language.FAMILIES:
        model = vision_language.model(family, 32, 0)
    else:
        model = toys.toy(family, VOCABULARY, sharpness=12.0)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def told(family: str, trial: str) -> str:
    """What the command says of a pair, in a line; begins with `CRASHED` where it did not say it itself."""
    from trl_opsd.cli.main import app

    with tempfile.TemporaryDirectory() as folder:
        try:
            saved(family, folder)
        except Exception as error:
            return f"not built: {' '.join(str(error).split())[:100]}"
        done = CliRunner().invoke(app, [trial.split()[0], folder, folder, *TRIALS[trial]])
    if done.exit_code == 2:
        return f"refused: {' '.join(done.stderr.split())[-300:]}"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"CRASHED {type(done.exception).__name__}: {' '.join(str(done.exception).split())[:300]}"
    found = json.loads(done.stdout)
    if trial == "plan":
        parts = found["phases"]
        sizes = {"activations": parts["training"]["activations"], "KV cache": parts["rollout"]["KV cache"]}
        return ", ".join(f"{name} {size / 1e3:.0f} kB" for name, size in sizes.items())
    odd = [f"{one['name']} {one['verdict']}: {one['said'][:160]}" for one in found["checks"] if one["verdict"] != "ok"]
    return "; ".join([found["verdict"], *odd])


def main() -> int:
    """Prints every result; returns how many are tracebacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=list(TRIALS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    crashed = 0
    for family in options.families or [*toys.families(), *vision_language.FAMILIES]:
        for trial in options.trials:
            said = isolated(lambda family=family, trial=trial: told(family, trial))
            crashed += said.startswith("CRASHED")
            print(f"{family:24} {trial:14} {said}", flush=True)
    return crashed


if __name__ == "__main__":
    sys.exit(main() > 0)
