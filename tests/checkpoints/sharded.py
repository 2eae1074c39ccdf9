"""Two processes that resume, get a SIGTERM, save late, and are killed while they save."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from kill_saves import Deadline
from support import forks
from support.witnessed_run import Watched
from transformers import TrainerCallback

from trl_opsd.checkpoints import checkpoint_to_resume, problems

Make = Callable[..., Watched]
"""[`watched.trainer`] with its models bound."""
STOPPED_FROM = 2
EACH_STEP = {"save_strategy": "steps", "save_steps": 1}
Resumes = dict[str, tuple[int, ...]]
"""The steps to resume at, by variant: 3 is in the middle of the second epoch, and at 4 the third begins."""
KILLS = (
    (1, "half _unfinished/checkpoint-N/global_stepN/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    (0, "os.rename _unfinished/checkpoint-N"),
)
"""The process to kill, and the change to kill it at: a shard of the optimizer, the rename."""


# ---- What a process does -----------------------------------------------------------------------------------------


def resume(make: Make, folder: Path, resumes: Resumes) -> dict[str, Any]:
    """For each variant an uninterrupted run, and some resumed from its checkpoints in another folder."""
    seen: dict[str, Any] = {}
    for variant, steps in resumes.items():
        whole = make(folder / variant, variant, **EACH_STEP)
        whole.train()
        seen[variant] = {"whole": asdict(whole.witness), "resumed": {}}
        for step in steps:
            torch.manual_seed(12345)  # random numbers drawn before must not matter
            other = make(folder / "elsewhere", variant)
            other.train(resume_from_checkpoint=str(folder / variant / f"checkpoint-{step}"))
            seen[variant]["resumed"][step] = asdict(other.witness)
    seen["strategy"] = [str(whole.accelerator.distributed_type), whole.accelerator.num_processes]
    return seen


def stop(make: Make, folder: Path, begin: Path) -> list[dict[str, Any]]:
    """One process gets a SIGTERM while it generates; then, in the resumed run, the other one while it saves."""
    seen: list[dict[str, Any]] = []
    for rank, method, saving in ((1, "complete", {}), (0, "_save_optimizer_and_scheduler", EACH_STEP)):
        run = make(folder, "full", enable_jit_checkpoint=True, **saving)
        if run.accelerator.process_index == rank:
            _do_first(run, method, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run.train(resume_from_checkpoint=True if seen else str(begin))
        seen.append({"step": run.state.global_step, **asdict(run.witness)})
    return seen


def be_late(make: Make, folder: Path, begin: Path) -> list[str]:
    """Process 1 is a second late for a save; returns the folders named checkpoints by then."""
    run, found = make(folder, "full", **EACH_STEP), []
    run.add_callback(OneStep(run, None))
    if run.accelerator.process_index == 1:

        def dawdle() -> None:
            time.sleep(1)
            found.extend(_named(folder))

        _do_first(run, "_save_optimizer_and_scheduler", dawdle)
    run.train(resume_from_checkpoint=str(begin))
    return found


PARTS: dict[str, Callable[[Make, Path, Path], Any]] = {"stopped": stop, "late": be_late}


def tried(make: Make, folder: Path, resumes: Resumes, parts: tuple[str, ...]) -> dict[str, Any]:
    begin = folder / "full" / f"checkpoint-{STOPPED_FROM}"
    found = resume(make, folder, resumes)
    return found | {part: PARTS[part](make, folder / part, begin) for part in parts}


def save_once(make: Make, folder: Path, note: Path, rank: int, change: str) -> None:
    """Resumes from the newest checkpoint for one step and saves; one process is killed at a change to the folder."""
    run = make(folder, "full", **EACH_STEP, save_total_limit=1)
    process = run.accelerator.process_index
    run.add_callback(OneStep(run, note.with_suffix(f".{process}.json")))
    Deadline(folder, change if process == rank else None, _mark(note, process)).arm()
    run.train(resume_from_checkpoint=True)


class OneStep(TrainerCallback):
    """Ends a run after its first save; with a `note`, it first records where the run resumed from."""

    def __init__(self, run: Watched, note: Path | None) -> None:
        self.run, self.note = run, note

    def on_step_end(self, args, state, control, **kwargs):
        if self.note is not None:
            self.note.write_text(json.dumps({"from": state.global_step - 1, "losses": self.run.witness.losses}))

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


def _do_first(run: Watched, name: str, act: Callable[[], None]) -> None:
    method = getattr(run, name)

    def acting(*args: Any) -> Any:
        act()
        return method(*args)

    setattr(run, name, acting)


# ---- What is done with pairs of processes ------------------------------------------------------------------------


def _named(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def _mark(note: Path, process: int) -> Path:
    """The file that a process leaves when it is killed."""
    return note.with_suffix(f".{process}.killed")


def kill(make: Make, folder: Path, start: Path) -> list[dict[str, Any]]:
    """Starts a pair of processes for each kill, which resumes from what the last one left."""
    out, kills = folder / "out", []
    shutil.copytree(start, out / start.name)
    for number, (rank, change) in enumerate(KILLS):
        newest, note = checkpoint_to_resume(True, out)[0].name, folder / f"kill-{number}"
        forks.launched("zero3_cpu", save_once, make, out, note, rank, change)
        kills.append(
            {
                "rank": rank,
                "killed": [process for process in range(forks.PROCESSES) if _mark(note, process).exists()],
                "newest": newest,
                "went_on": [json.loads(path.read_text()) for path in sorted(folder.glob(f"{note.name}.*.json"))],
                "half_written": [name for name in _named(out) if problems(out / name)],
                "left": checkpoint_to_resume(True, out)[0].name,
            }
        )
    return kills
