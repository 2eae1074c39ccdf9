"""Run as one process: has torch's elastic agent start two processes repeatedly, and breaks one of them each time.

The agent is the one behind `torchrun` and `accelerate launch`; its processes are forked, so that imports are shared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import faults
import forks
import tiny
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

VARIANTS = {
    f"{policy} {side}{' unclipped' if norm == 0 else ''}": {"side": side, "nonfinite": policy, "max_grad_norm": norm}
    for policy in ("raise", "skip")
    for side, norm in (("teacher", 1.0), ("student", 1.0), ("gradient", 1.0), ("gradient", 0.0))
}
PHASES = ("complete", "teach", "compare", "save")
PATIENCE = 15
"""Seconds, as `ddp_timeout`, that one process waits for the other."""
SECONDS = 120
"""Time limit after which a process that still waits prints its stack and ends."""


def every_nan(folder: Path) -> dict[str, Any]:
    """All variants, in one pair of processes."""
    teacher = tiny.qwen2(48, seed=1)
    return {name: faults.trained_with_nan(folder, teacher, **options) for name, options in VARIANTS.items()}


def collapses(folder: Path) -> dict[str, Any]:
    """A training at a rate that is far too high, of which each process has other rows."""
    options = {"learning_rate": 1.0, "max_steps": 24, "collapse_guard": "stop", "num_train_epochs": 99}
    trainer = faults.make_trainer(folder, tiny.qwen2(48, seed=1), **options)
    trainer.train()
    return {"steps": trainer.state.global_step, "course": trainer._course.state()}


def fails(folder: Path, phase: str) -> None:
    """A script whose training fails: in a phase, because of a NaN, or because one process hangs."""
    patience = {"ddp_timeout": PATIENCE} if phase == "hang" else {}
    trainer = faults.make_trainer(folder, tiny.qwen2(48, seed=1), save_strategy="steps", save_steps=1, **patience)
    if phase == "nan":
        faults.poison(trainer, "teacher")
    elif phase == "hang":
        faults.hang(trainer)
    else:
        faults.fail_in(trainer, phase)
    trainer.train()


def script(what: str, folder: Path) -> Any:
    """Ends as a script would: on SIGTERM, or through `sys.excepthook` with a status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the agent, which it was forked from
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        if what == "collapse":
            return collapses(folder)
        return every_nan(folder) if what == "every nan" else fails(folder, what)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def launched(what: str, folder: Path, strategy: str = "ddp") -> dict[str, Any]:
    """The results of two processes; or the rank that failed first, and when both had ended."""
    try:
        return {"returned": forks.launch(strategy, script, what, folder)}
    except ChildFailedError as error:
        return {"first": error.get_first_failure()[0], "ended": time.time()}


def main(folder: Path) -> None:
    results = {}
    for what in ("every nan", "collapse", "nan", "hang", *PHASES):
        with (folder / f"{what}.err").open("wb") as file:
            os.dup2(file.fileno(), 2)
        results[what] = launched(what, folder)
    with (folder / "fsdp2.err").open("wb") as file:
        os.dup2(file.fileno(), 2)
    results["every nan, fsdp2"] = launched("every nan", folder / "fsdp2", "fsdp2_cpu")
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
