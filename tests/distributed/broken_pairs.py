"""What two processes do, one of which breaks; as a script, it fails in a save under `accelerate launch`."""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path
from typing import Any

from support import faults, tiny

from trl_opsd.methods.collapse import CollapseGuard

VARIANTS = {
    f"{policy} {side}{' unclipped' if norm == 0 else ''}": {"side": side, "nonfinite": policy, "max_grad_norm": norm}
    for policy in ("raise", "skip")
    for side, norm in (("teacher", 1.0), ("student", 1.0), ("gradient", 1.0), ("gradient", 0.0), ("divergence", 1.0))
    if (policy, side) != ("raise", "divergence")
}
VARIANTS["raise empty"] = {"side": "empty", "weight_decay": 0.1}
PATIENCE = 10
"""Seconds, as `ddp_timeout`, that one process waits for the other."""
SECONDS = 300
"""Time limit after which a process that still waits prints its stack and ends."""


def every_nan(folder: Path, variants: tuple[str, ...]) -> dict[str, Any]:
    """All variants, in one pair of processes."""
    teacher = tiny.qwen2(48, seed=1)  # before there is a DeepSpeed config, so that it stays whole
    return {name: faults.trained_with_nan(folder, teacher, **VARIANTS[name]) for name in variants}


def collapses(folder: Path) -> dict[str, Any]:
    """A training at a rate that is far too high, of which each process has other rows."""
    options = {"learning_rate": 1.0, "max_steps": 24, "num_train_epochs": 99}
    trainer = faults.make_trainer(folder, tiny.qwen2(48, seed=1), **options)
    trainer.train()
    return {"steps": trainer.state.global_step, "course": trainer.methods.get(CollapseGuard).state()}


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


def script(what: str, folder: Path, *given: Any) -> Any:
    """Ends as a script would: on SIGTERM, or through `sys.excepthook` with a status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as the agent, which it was forked from
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        if what == "collapse":
            return collapses(folder)
        return every_nan(folder, *given) if what == "every nan" else fails(folder, what)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


if __name__ == "__main__":
    fails(Path(sys.argv[1]), "save")
