"""Saves once, then again and again in forks, each killed at a different file of the save."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.modeling_utils
from support.witnessed_run import Watched
from support.witnessed_run import trainer as made

from trl_opsd.checkpoints import checkpoint_to_resume, problems

CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


def of_any_step(change: str) -> str:
    """A change without the number of the step in it."""
    return re.sub(r"(checkpoint-|global_step)\d+", r"\1N", change)


class Deadline:
    """Ends this process, as `kill -9` would, at a change that a save makes: the n-th, or the first [`of_any_step`].

    If `mark` is given, it creates that file right before.
    """

    def __init__(self, folder: Path, last: int | str | None, mark: Path | None = None) -> None:
        self.folder, self.last, self.mark, self.seen = str(folder), last, mark, []

    def arm(self) -> None:
        torch.save = self.tearing(torch.save, 1)
        transformers.modeling_utils.safe_save_file = self.tearing(safetensors.torch.save_file, 1)
        sys.addaudithook(self.audit)

    def reached(self, event: str, path: Any) -> bool:
        if not str(path).startswith(self.folder):
            return False
        self.seen.append(f"{event} {os.path.relpath(path, self.folder)}")
        return self.last in (len(self.seen), of_any_step(self.seen[-1]))

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[0], str | Path) and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)
        if event == "os.mkdir" and os.path.isdir(args[0]):
            return
        if (writes or event in CHANGES) and self.reached(event, args[0]):
            self.end()

    def tearing(self, write: Callable[..., Any], path_at: int) -> Callable[..., Any]:
        """Wraps a writer that audit hooks do not see; when killed, it leaves half a file."""

        def torn(*args: Any, **kwargs: Any) -> Any:
            path = args[path_at]
            written = write(*args, **kwargs)
            if self.reached("half", path):
                os.truncate(path, os.path.getsize(path) // 2)
                self.end()
            return written

        return torn

    def end(self) -> None:
        if self.mark is not None:
            self.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def save_again(trainer: Watched, last: int) -> list[str]:
    """Saves step 2 and returns the changes made to the folder."""
    deadline = Deadline(Path(trainer.args.output_dir), last)
    deadline.arm()
    trainer.state.global_step = 2
    trainer._save_checkpoint(trainer.model, None)
    return deadline.seen


def in_a_fork(act: Callable[[], Any], answer: Path) -> int:
    """Runs `act` in a fork and returns its exit status."""
    child = os.fork()
    if child == 0:
        answer.write_text(json.dumps(act()))
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed(folder: Path) -> list[dict[str, Any]]:
    """For each kill, what it left, and the checkpoint to resume from; the last save is not disturbed."""
    once = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "eval_strategy": "no"}
    trainer, kills = made(folder / "first", "full", max_steps=1, **once), list[dict[str, Any]]()
    trainer.train()
    for last in itertools.count(1):
        out, answer = folder / f"{last}", folder / "seen.json"
        shutil.copytree(folder / "first", out)
        trainer.args.output_dir = str(out)
        status = in_a_fork(lambda last=last: save_again(trainer, last), answer)
        named = [path for path in out.iterdir() if path.name.startswith("checkpoint-")]
        goes_on, remarks = checkpoint_to_resume(True, out)
        kills.append(
            {
                "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
                "half_written": [path.name for path in named if problems(path)],
                "goes_on_from": goes_on.name,
                "remarks": remarks,
                "out": str(out),
            }
        )
        if status == 0:
            return [*kills[:-1], kills[-1] | {"changes": json.loads(answer.read_text())}]
