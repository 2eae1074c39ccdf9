"""Publishes checkpoints atomically, by renaming a complete folder, and tells complete from torn ones.

It knows files, and no models. Whenever a process is killed, a folder `checkpoint-N` that was published here is
complete, and the previous checkpoint still exists.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments

from trl_opsd.checkpoints.manifest import MANIFEST, has_manifest, problems, seal, sync

UNFINISHED = "_unfinished"
"""Folder beside the checkpoints in which one is written. Uploads to the Hub skip names that start with `_`."""

_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = re.compile(r"(deleted-)?checkpoint-\d+")
"""Names in `UNFINISHED` that are ours to delete. Nothing else in it is touched."""
_STATE = "trainer_state.json"
"""The last file that transformers writes into a checkpoint."""
_DELAY = 5.0
"""Seconds until a file on a network disk is visible to other machines."""


def check_disk(args: TrainingArguments) -> None:
    """Rejects an `output_dir` in which checkpoints lack files, or several machines write the same. Collective."""
    if args.save_strategy == "no" and not args.enable_jit_checkpoint:
        return
    [name] = broadcast_object_list([uuid4().hex])
    # A random name, which no earlier run has left there.
    mark = Path(args.output_dir, f".{name}")
    if args.process_index == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    PartialState().wait_for_everyone()
    found = gather_object([(args.process_index, _appears(mark), args.should_save)])
    if args.process_index == 0:
        mark.unlink()
    if absent := [str(process) for process, sees_it, _ in found if not sees_it]:
        if not args.save_on_each_node:
            raise ValueError(
                f"Processes {', '.join(absent)} do not see what process 0 writes to {args.output_dir}, so that no "
                "checkpoint would be complete. Name a folder on a disk that all machines share, or set "
                "`save_on_each_node=True`, with which each machine keeps its part and needs it to resume."
            )
    elif sum(saves for *_, saves in found) > 1:
        raise ValueError(
            f"All machines see the same {args.output_dir}, and with `save_on_each_node=True` each would write the same "
            "files there. Leave the option out."
        )


def begin(run_dir: Path) -> Path:
    """Creates the folder in which the next `checkpoint-N` is written, and deletes unfinished ones from it."""
    recover(run_dir)
    unfinished = run_dir / UNFINISHED
    unfinished.mkdir(parents=True, exist_ok=True)
    _clear(unfinished)
    return unfinished


def publish(written: Path, run_dir: Path, known: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Writes the manifest of `checkpoint-N`, syncs it to disk, and renames it into `run_dir`.

    A checkpoint of the same name is replaced; one without our manifest is kept as `replaced-checkpoint-N`. Files in
    `known`, which other processes have hashed, are not hashed again.
    """
    seal(written, known)  # `written` is on the same file system, under `run_dir`, so that a rename is atomic
    return _move_in(written, run_dir)


def recover(run_dir: Path) -> None:
    """Publishes checkpoints that a killed process had completed but not yet renamed."""
    unfinished = run_dir / UNFINISHED
    if unfinished.is_symlink() or (unfinished.exists() and not unfinished.is_dir()):
        raise ValueError(
            f"{unfinished} is a {'symlink' if unfinished.is_symlink() else 'file'}: expected a folder of our own, in "
            "which checkpoints are written and deleted. Remove it, or use another `output_dir`."
        )
    # A manifest is written last, so a folder without problems was complete when the process was killed.
    for _, folder in _numbered(unfinished):
        if not folder.is_symlink() and not problems(folder):
            _move_in(folder, run_dir)


def newest_complete(run_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The complete checkpoint of the highest step, and the torn ones of higher steps with the problems of each."""
    torn: dict[Path, list[str]] = {}
    for _, folder in sorted(_numbered(run_dir), reverse=True):
        wrong = problems(folder)
        if not wrong:
            return folder, torn
        torn[folder] = wrong
    return None, torn


def checkpoint_to_resume(asked: str | bool, run_dir: Path) -> tuple[Path, list[str]]:
    """The requested checkpoint, or for `True` the newest complete one, and messages for the user about it."""
    if asked is True or str(asked).lower() == "true":  # text on a command line
        recover(run_dir)
        newest, torn = newest_complete(run_dir)
        if newest is None:
            raise ValueError(f"There is no complete checkpoint in {run_dir}.{_listed(torn)} {_REMEDY}")
        return newest, [f"Resuming from {newest}, the newest complete checkpoint.{_listed(torn)}"] if torn else []
    folder = Path(str(asked))
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}.{_alternative(folder.parent)} {_REMEDY}")
    if not (folder / _STATE).is_file() and newest_complete(folder)[0] is not None:
        raise ValueError(f"{folder} is no checkpoint, but contains some.{_alternative(folder)} {_REMEDY}")
    if _is_foreign(folder):
        return folder, [f"Resuming from {folder}, which has no {MANIFEST}: whether it is complete cannot be checked."]
    if wrong := problems(folder):
        raise ValueError(f"{_listed({folder: wrong}).strip()}{_alternative(folder.parent)} {_REMEDY}")
    return folder, []


def remedy(run_dir: Path, step: int) -> str:
    """How to continue after an error at this step; empty in the first step. Reads no files, which may be large."""
    if not step:
        return ""
    saved = [folder for number, folder in sorted(_numbered(run_dir)) if number <= step and has_manifest(folder)]
    if not saved:
        return f"{run_dir} has no checkpoint of this run to resume from: `save_steps` says how often one is written."
    return (
        f"To go on from {saved[-1]}, the newest checkpoint, train with `resume_from_checkpoint=True`, on a "
        "command line `--resume_from_checkpoint true`."
    )


def rotate(run_dir: Path, limit: int | None, keep: Collection[Path]) -> list[str]:
    """Deletes our oldest checkpoints beyond `limit`, but those in `keep`; a warning for each that cannot be deleted."""
    # A folder without a manifest (such as the empty one that a killed run of another trainer leaves) is not counted.
    ours = [folder for _, folder in sorted(_numbered(run_dir)) if not folder.is_symlink() and has_manifest(folder)]
    ours.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime)  # a new run counts its steps from 0 again
    kept = {os.path.realpath(folder) for folder in keep}
    surplus = len(ours) - max(limit, 1) if limit else 0
    warnings = []
    for folder in [folder for folder in ours if os.path.realpath(folder) not in kept][: max(surplus, 0)]:
        # Renamed first: if the process is killed here, `checkpoint-N` is either complete or gone.
        deleted = run_dir / UNFINISHED / f"deleted-{folder.name}"
        deleted.parent.mkdir(exist_ok=True)
        try:
            os.rename(folder, deleted)
            shutil.rmtree(deleted)
        except OSError as error:
            warnings.append(f"{folder} cannot be deleted to meet `save_total_limit={limit}`: {error}.")
    _remove_unfinished(run_dir / UNFINISHED)
    return warnings


def best_evaluated(run_dir: Path, history: Sequence[Mapping[str, Any]]) -> Path | None:
    """The complete checkpoint whose evaluation had the smallest loss, as a mean over datasets; `None` without one."""
    losses: dict[int, list[float]] = {}
    for row in history:
        found = [value for name, value in row.items() if name.startswith("eval_") and name.endswith("loss")]
        losses.setdefault(row["step"], []).extend(found)
    folders = {run_dir / f"checkpoint-{step}": sum(each) / len(each) for step, each in losses.items() if each}
    whole = [folder for folder, loss in folders.items() if not math.isnan(loss) and has_manifest(folder)]
    return min(whole, key=lambda folder: folders[folder], default=None)


_REMEDY = "Pass the path of a complete checkpoint, or train without `resume_from_checkpoint`."
_SHOWN = 3
"""Maximum number of problems that a message lists for a checkpoint."""


def check_launch(folder: Path, deepspeed: bool, fsdp: bool) -> None:
    """Rejects a checkpoint of another kind of launch, whose optimizer would silently start anew."""
    saved = {
        "DeepSpeed": any(folder.glob("global_step*")),  # each launch saves the optimizer in files of other names
        "FSDP": (folder / "optimizer.bin").exists() or (folder / "optimizer_0").exists(),
        "one process or DDP": (folder / "optimizer.pt").exists(),
    }
    now = "DeepSpeed" if deepspeed else "FSDP" if fsdp else "one process or DDP"
    if any(saved.values()) and not saved[now]:
        written = next(name for name, was in saved.items() if was)
        raise ValueError(
            f"{folder} was written under {written}, and this launch is {now}, which would train on with a new "
            "optimizer: resume under the launch that wrote it, or pass the folder as `model` and start a new run."
        )


def _appears(file: Path) -> bool:
    """Whether a file written elsewhere is visible here, which a network disk may delay."""
    latest = monotonic() + _DELAY
    while not file.exists():
        if monotonic() > latest:
            return False
        sleep(0.1)
    return True


def _listed(torn: dict[Path, list[str]]) -> str:
    def shown(wrong: list[str]) -> str:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return "; ".join(wrong[:_SHOWN]) + more

    foreign = [folder for folder in torn if _is_foreign(folder)]
    said = "".join(f" {folder} is not complete: {shown(torn[folder])}." for folder in torn if folder not in foreign)
    if foreign:
        said += (
            f" {foreign[0]} has no {MANIFEST}, since TRL and `transformers` write none, so whether it is complete "
            f"cannot be checked: to resume from it, pass its path, `resume_from_checkpoint={str(foreign[0])!r}`."
        )
    return said


def _is_foreign(folder: Path) -> bool:
    """Whether another trainer completed this checkpoint."""
    return not (folder / MANIFEST).exists() and (folder / _STATE).is_file()


def _alternative(run_dir: Path) -> str:
    newest, _ = newest_complete(run_dir)
    return f" The newest complete checkpoint there is {newest}." if newest else ""


def _move_in(written: Path, run_dir: Path) -> Path:
    checkpoint = run_dir / written.name
    replaced = written.parent / f"deleted-{written.name}"
    if os.path.lexists(checkpoint):
        os.rename(checkpoint, replaced if _is_ours(checkpoint) else _free_name(run_dir, checkpoint.name))
    # If the process is killed between these two renames, `recover` does the second.
    os.rename(written, checkpoint)
    sync(run_dir)
    if replaced.exists():
        shutil.rmtree(replaced)
    return checkpoint


def _free_name(run_dir: Path, name: str) -> Path:
    for number in range(1000):
        free = run_dir / (f"replaced-{name}" + (f"-{number}" if number else ""))
        if not os.path.lexists(free):
            return free
    raise ValueError(f"{run_dir} holds a thousand folders named replaced-{name}: remove them.")


def _is_ours(checkpoint: Path) -> bool:
    """Whether a checkpoint may be deleted: it has our manifest, or is empty."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return False
    # An empty one is what a killed run of another trainer leaves.
    return has_manifest(checkpoint) or not os.listdir(checkpoint)


def _clear(unfinished: Path) -> None:
    """Deletes unfinished checkpoints. A file or symlink with such a name is not ours and is moved out of the folder."""
    for path in [unfinished / name for name in os.listdir(unfinished) if _TEMPORARY.fullmatch(name)]:
        if path.is_symlink() or not path.is_dir():
            os.rename(path, _free_name(unfinished.parent, path.name))
        else:
            shutil.rmtree(path)


def _remove_unfinished(unfinished: Path) -> None:
    """Deletes our files in the folder, and the folder unless it contains something else."""
    if not unfinished.exists():
        return
    with suppress(OSError):  # a failed deletion was reported already, and the next save tries again
        _clear(unfinished)
        unfinished.rmdir()


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir()]
