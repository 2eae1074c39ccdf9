"""Publishes a checkpoint by renaming a complete folder, tells complete from torn ones, and chooses where to resume.

Whenever a process is killed, a folder `checkpoint-N` that was published here is complete, and the previous checkpoint
still exists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from trl_opsd.errors import OPSDError

MANIFEST = "opsd_manifest.json"
"""Lists every other file with its size; written last: without it, one is torn."""

UNFINISHED = "_unfinished"
"""Folder beside the checkpoints in which one is written. Uploads to the Hub skip names that start with `_`."""

_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = re.compile(r"(deleted-)?checkpoint-\d+")
"""Names in `UNFINISHED` that are ours to delete. Nothing else in it is touched."""
_DELAY = 5.0
"""Seconds until a file on a network disk is visible to other machines."""
_REMEDY = "Pass the path of a complete checkpoint, or train without `resume_from_checkpoint`."


def check_folder(args: TrainingArguments) -> None:
    """Refuses an `output_dir` that this process cannot write to, or not make; leaves nothing behind."""
    folder = Path(args.output_dir).absolute()
    try:
        if args.should_save:
            TemporaryFile(dir=next(one for one in (folder, *folder.parents) if one.exists())).close()
    except OSError as error:
        raise ValueError(
            f"`output_dir={args.output_dir!r}` cannot be written to ({error.strerror}): set one that can."
        ) from None


def check_disk(args: TrainingArguments) -> None:
    """Rejects an `output_dir` in which checkpoints lack files, or several machines write the same. Collective."""
    if args.save_strategy == "no" and not args.enable_jit_checkpoint:
        return
    # A random name, which no earlier run has left there.
    [name] = broadcast_object_list([uuid4().hex])
    mark = Path(args.output_dir, f".{name}")
    if args.process_index == 0:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    PartialState().wait_for_everyone()
    latest = monotonic() + _DELAY
    while not (is_there := mark.exists()) and monotonic() < latest:
        sleep(0.1)
    found = gather_object([(is_there, args.should_save)])
    if args.process_index == 0:
        mark.unlink()
    is_shared = all(sees_it for sees_it, _ in found)
    if sum(saves for _, saves in found) > 1 if is_shared else not args.save_on_each_node:
        raise ValueError(
            f"Processes {'share' if is_shared else 'do not share'} {args.output_dir}, but `save_on_each_node` is "
            f"{args.save_on_each_node}: set it to {not args.save_on_each_node}, or choose another folder. If True, "
            "each machine saves to its own disk and resumes from it."
        )


# ---- Complete or torn -----------------------------------------------------------------------------------------------


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The folders `checkpoint-N` in a folder, by their step."""
    matches = [(_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def has_manifest(checkpoint: Path) -> bool:
    """Whether a folder has a manifest, even if its files have changed since."""
    return (checkpoint / MANIFEST).is_file()


def problems(checkpoint: Path) -> list[str]:
    """Lists what is missing from a checkpoint or has another size than in its manifest; empty if it is complete."""
    if not has_manifest(checkpoint):
        return [f"{MANIFEST} is missing: saving was interrupted, or TRL or `transformers` wrote it: pass its path"]
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        expected = {name: int(entry["bytes"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return [f"{MANIFEST} cannot be read: {error!r}"]
    found = {name: path.stat().st_size for name, path in _files(checkpoint).items()}
    return [
        f"{name} has {found[name]} bytes instead of {size}" if name in found else f"{name} is missing"
        for name, size in sorted(expected.items())
        if found.get(name) != size
    ]


def _files(folder: Path) -> dict[str, Path]:
    """Every file but the manifest, by its path relative to the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    return {path.relative_to(folder).as_posix(): path for path in paths}


# ---- Writing --------------------------------------------------------------------------------------------------------


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Raises an `OPSDError` for an error that a full disk has caused."""
    try:
        yield
    except Exception as error:
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        free = shutil.disk_usage(there).free
        # torch only says "unexpected pos", and leaves what it has written.
        if "No space left" not in str(error) and free > 2**20:
            raise
        raise OPSDError(
            f"The disk of {folder} is full, {free:,} bytes are free: make room, or set `output_dir`, "
            "`save_total_limit` or `save_only_model=True`."
        ) from error


def begin(run_dir: Path) -> Path:
    """Creates the folder in which the next `checkpoint-N` is written, and deletes unfinished ones from it."""
    recover(run_dir)
    unfinished = run_dir / UNFINISHED
    unfinished.mkdir(parents=True, exist_ok=True)
    _clear(unfinished)
    return unfinished


def sync_files(folder: Path) -> None:
    """Syncs every file of a folder to disk, and the folders, since a file without a synced entry may vanish."""
    files = _files(folder).values()
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync, {folder, *files, *(path.parent for path in files)}))


def publish(written: Path, run_dir: Path) -> Path:
    """Writes the manifest of `checkpoint-N`, whose files are synced, and renames it into `run_dir`.

    A checkpoint of the same name is replaced; anything without our manifest is kept as `replaced-checkpoint-N-...`.
    """
    manifest = written / MANIFEST
    sizes = {name: {"bytes": path.stat().st_size} for name, path in _files(written).items()}
    with manifest.open("w", encoding="utf-8") as file:
        json.dump({"files": sizes}, file, indent=1)
    for one in (manifest, written):
        sync(one)
    return _move_in(written, run_dir)  # on the same file system, under `run_dir`, so that a rename is atomic


def recover(run_dir: Path) -> None:
    """Publishes checkpoints that a killed process had completed but not yet renamed."""
    # A manifest is written last, so a folder without problems was complete when the process was killed.
    for _, folder in numbered(run_dir / UNFINISHED):
        if not problems(folder):
            _move_in(folder, run_dir)


def rotate(run_dir: Path, limit: int | None, keep: Collection[Path]) -> list[str]:
    """Deletes our oldest checkpoints beyond `limit`, but those in `keep`; a warning for each that cannot be deleted."""
    ours = [folder for _, folder in numbered(run_dir) if _is_ours(folder)]
    ours.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime)  # a new run counts its steps from 0 again
    kept = {folder.resolve() for folder in keep}
    surplus = max(len(ours) - max(limit, 1), 0) if limit else 0
    unfinished, warnings = run_dir / UNFINISHED, []
    unfinished.mkdir(exist_ok=True)
    for folder in [folder for folder in ours if folder.resolve() not in kept][:surplus]:
        try:
            # Renamed first: if the process is killed here, `checkpoint-N` is either complete or gone.
            os.rename(folder, unfinished / f"deleted-{folder.name}")
        except OSError as error:
            warnings.append(f"{folder} cannot be deleted to meet `save_total_limit={limit}`: {error}.")
    with suppress(OSError):  # the next save tries again, or raises it
        _clear(unfinished)
        unfinished.rmdir()  # unless it contains something else
    return warnings


def _move_in(written: Path, run_dir: Path) -> Path:
    checkpoint = run_dir / written.name
    deleted = written.parent / f"deleted-{written.name}"
    if os.path.lexists(checkpoint):
        other = run_dir / f"replaced-{written.name}-{uuid4().hex[:8]}"  # a name that nothing has yet
        os.rename(checkpoint, deleted if _is_ours(checkpoint) else other)
    # If the process is killed between these two renames, `recover` does the second.
    os.rename(written, checkpoint)
    sync(run_dir)
    if deleted.exists():
        shutil.rmtree(deleted)
    return checkpoint


def _is_ours(checkpoint: Path) -> bool:
    """Whether a checkpoint was published here, so that it may be deleted."""
    return has_manifest(checkpoint) and not checkpoint.is_symlink()


def _clear(unfinished: Path) -> None:
    """Deletes unfinished checkpoints; an error for a file or symlink with such a name, which is not ours."""
    for name in filter(_TEMPORARY.fullmatch, os.listdir(unfinished)):
        shutil.rmtree(unfinished / name)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Resuming -------------------------------------------------------------------------------------------------------


def checkpoint_to_resume(asked: str | bool, run_dir: Path) -> tuple[Path, list[str]]:
    """The requested checkpoint, or for `True` the newest complete one, and messages for the user about it."""
    if str(asked).lower() == "true":  # also text on a command line
        recover(run_dir)
        newest, torn = newest_complete(run_dir)
        if newest is None:
            raise ValueError(" ".join([f"There is no complete checkpoint in {run_dir}.", *torn, _REMEDY]))
        return newest, [f"Resuming from {newest}: {one}" for one in torn]
    folder = Path(str(asked))
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}. {_REMEDY}")
    if not has_manifest(folder) and (folder / "trainer_state.json").is_file():  # of transformers, its last file
        said = "it may be incomplete; if it has no optimizer state, the optimizer starts anew."
        return folder, [f"{folder} has no {MANIFEST}: {said}"]
    if wrong := problems(folder):
        raise ValueError(f"{folder} is not complete: {wrong[0]}. {_REMEDY}")
    return folder, []


def newest_complete(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The complete checkpoint of the highest step, and what is wrong with each of a higher step."""
    torn: list[str] = []
    for _, folder in reversed(numbered(run_dir)):
        wrong = problems(folder)
        if not wrong:
            return folder, torn
        torn.append(f"{folder} is not complete: {wrong[0]}.")
    return None, torn


def check_launch(folder: Path, deepspeed: bool, fsdp: bool) -> None:
    """Rejects a checkpoint of another kind of launch, whose optimizer would silently start anew."""
    saved = {
        "DeepSpeed": any(folder.glob("global_step*")),  # each launch saves the optimizer in files of other names
        "FSDP": (folder / "optimizer.bin").exists() or (folder / "optimizer_0").exists(),
        "one process or DDP": (folder / "optimizer.pt").exists(),
    }
    now = "DeepSpeed" if deepspeed else "FSDP" if fsdp else "one process or DDP"
    if any(saved.values()) and not saved[now]:
        raise ValueError(
            f"{folder} has no optimizer state of {now}, which this launch uses, and would continue with a new one: "
            "resume with the original launch, or pass the folder as `model` and start a new run."
        )


def remedy(run_dir: Path, step: int) -> str:
    """How to continue after an error at this step; empty without a checkpoint. Reads no files, which may be large."""
    saved = [folder for number, folder in numbered(run_dir) if number <= step and has_manifest(folder)]
    return f"To resume from {saved[-1]}, the newest checkpoint, pass `resume_from_checkpoint=True`." if saved else ""


# ---- Rates ----------------------------------------------------------------------------------------------------------
#
# transformers loads the optimizer with all its settings, whatever the options say, and takes the first step at the rate
# that the schedule of the earlier run had left.

_CHANGED = ("params", "param_names", "lr")
"""What of a group is no setting; `initial_lr` is the rate that a schedule multiplies."""


def settings_of(optimizer: Any) -> dict[tuple[int, str], Any]:
    """The settings of an optimizer that no schedule changes, by group and name."""
    groups = enumerate(getattr(optimizer, "param_groups", []))  # one that a launcher wraps may have none
    return {(at, name): value for at, one in groups for name, value in one.items() if name not in _CHANGED}


def not_taken(asked: dict[tuple[int, str], Any], loaded: dict[tuple[int, str], Any]) -> str:
    """The settings that a checkpoint has overwritten, with both values; empty if there are none."""
    changed = {
        f"{'learning_rate' if key[1] == 'initial_lr' else key[1]}={loaded[key]} instead of {value}"
        for key, value in asked.items()
        if key in loaded and loaded[key] != value
    }
    return ", ".join(sorted(changed))


def set_rates(scheduler: Any) -> None:
    """Sets the rates to those of this schedule at its step; the loaded ones are of the schedule before.

    Without a change of the schedule they are the same, bit for bit.
    """
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch -= 1
        scheduler.step()


def check_rates(scheduler: Any, steps: int) -> None:
    """Refuses a schedule whose rate is 0 in every step, as that of a warmup in a training of one step."""
    if not isinstance(scheduler, LambdaLR) or steps < 1:
        return
    pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    if not any(rate * factor(step) != 0 for step in range(steps) for rate, factor in pairs):
        raise ValueError(
            f"The learning rate is 0 in all {steps} steps, so no weight would change: set fewer `warmup_steps` or more "
            "steps, or pass another scheduler."
        )
