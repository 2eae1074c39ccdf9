"""Publishes a checkpoint by renaming a complete folder, tells complete from torn ones, and chooses where to resume.

Whenever a process is killed, a folder `checkpoint-N` that was published here is complete, and the previous checkpoint
still exists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import Any, TypeAlias
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
_STATE = "trainer_state.json"
"""The last file that transformers writes into a checkpoint."""
_REMEDY = "Pass the path of a complete checkpoint, or train without `resume_from_checkpoint`."
_SHOWN = 3
"""Maximum number of problems that a message lists for a checkpoint."""


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
    found = gather_object([(args.process_index, _appears(mark), args.should_save)])
    if args.process_index == 0:
        mark.unlink()
    if absent := [str(process) for process, sees_it, _ in found if not sees_it]:
        if not args.save_on_each_node:
            raise ValueError(
                f"Processes {', '.join(absent)} do not see the files that process 0 writes to {args.output_dir}, so no "
                "checkpoint would be complete. Use a folder on a disk that all machines share, or set "
                "`save_on_each_node=True`: each machine then saves its part and needs it to resume."
            )
    elif sum(saves for *_, saves in found) > 1:
        raise ValueError(
            f"All machines share {args.output_dir}, and with `save_on_each_node=True` each would write the same files "
            "there. Remove the option."
        )


def _appears(file: Path) -> bool:
    """Whether a file written elsewhere is visible here, which a network disk may delay."""
    latest = monotonic() + _DELAY
    while not file.exists():
        if monotonic() > latest:
            return False
        sleep(0.1)
    return True


# ---- Complete or torn -----------------------------------------------------------------------------------------------


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The folders `checkpoint-N` in a folder, by their step."""
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def has_manifest(checkpoint: Path) -> bool:
    """Whether a folder has a manifest, even if its files have changed since."""
    return (checkpoint / MANIFEST).is_file()


def problems(checkpoint: Path) -> list[str]:
    """Lists what is missing from a checkpoint or has another size than in its manifest; empty if it is complete."""
    if not has_manifest(checkpoint):
        return [f"{MANIFEST} is missing: it is incomplete or was written by another program"]
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
    paths = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    named = {path.relative_to(folder).as_posix(): path for path in sorted(paths) if path.is_file()}
    named.pop(MANIFEST, None)
    return named


# ---- Writing --------------------------------------------------------------------------------------------------------


@contextmanager
def on_disk(folder: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Raises an `OPSDError` for an error that a full disk has caused; `needed` are the bytes of what is written."""
    disk = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(disk).free
    try:
        yield
    except Exception as error:
        # torch only says "unexpected pos", and leaves what it has written.
        if "No space left" not in str(error) and shutil.disk_usage(disk).free > 2**20:
            raise
        raise OPSDError(
            f"The disk of {folder} is full: {free:,} bytes were free, more than {max(free, needed()):,} are needed: "
            "make room, or set `output_dir`, `save_total_limit` or `save_only_model=True`."
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
        list(pool.map(sync, files))
    for one in {folder, *(path.parent for path in files)}:
        sync(one)


def publish(written: Path, run_dir: Path) -> Path:
    """Writes the manifest of `checkpoint-N`, whose files are synced, and renames it into `run_dir`.

    A checkpoint of the same name is replaced; one without our manifest is kept as `replaced-checkpoint-N`.
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
        if not folder.is_symlink() and not problems(folder):
            _move_in(folder, run_dir)


def rotate(run_dir: Path, limit: int | None, keep: Collection[Path]) -> list[str]:
    """Deletes our oldest checkpoints beyond `limit`, but those in `keep`; a warning for each that cannot be deleted."""
    # A folder without a manifest (such as the empty one that a killed run of another trainer leaves) is not counted.
    ours = [folder for _, folder in numbered(run_dir) if not folder.is_symlink() and has_manifest(folder)]
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
    if (unfinished := run_dir / UNFINISHED).exists():
        with suppress(OSError):  # a failed deletion was reported already, and the next save tries again
            _clear(unfinished)
            unfinished.rmdir()  # unless it contains something else
    return warnings


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


def _is_ours(checkpoint: Path) -> bool:
    """Whether a checkpoint may be deleted: it has our manifest, or is empty."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return False
    # An empty one is what a killed run of another trainer leaves.
    return has_manifest(checkpoint) or not os.listdir(checkpoint)


def _free_name(run_dir: Path, name: str) -> Path:
    names = chain([""], (f"-{number}" for number in count(1)))
    return next(free for more in names if not os.path.lexists(free := run_dir / f"replaced-{name}{more}"))


def _clear(unfinished: Path) -> None:
    """Deletes unfinished checkpoints. A file or symlink with such a name is not ours and is moved out of the folder."""
    for path in [unfinished / name for name in os.listdir(unfinished) if _TEMPORARY.fullmatch(name)]:
        if path.is_symlink() or not path.is_dir():
            os.rename(path, _free_name(unfinished.parent, path.name))
        else:
            shutil.rmtree(path)


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
    if asked is True or str(asked).lower() == "true":  # text on a command line
        recover(run_dir)
        newest, torn = newest_complete(run_dir)
        if newest is None:
            raise ValueError(f"There is no complete checkpoint in {run_dir}.{_listed(torn)} {_REMEDY}")
        said = [f"Resuming from {newest}, the newest complete checkpoint.{_listed(torn)}"] if torn else []
        return newest, said
    folder = Path(str(asked))
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}.{_alternative(folder.parent)} {_REMEDY}")
    if _is_foreign(folder):
        states = [*folder.glob("optimizer*"), *folder.glob("global_step*")]
        lacking = "" if states else ", and no optimizer, which begins anew"
        return folder, [
            f"Resuming from {folder}, which has no {MANIFEST}{lacking}, so it cannot be checked for completeness."
        ]
    if wrong := problems(folder):
        raise ValueError(f"{_listed({folder: wrong}).strip()}{_alternative(folder.parent)} {_REMEDY}")
    return folder, []


def newest_complete(run_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The complete checkpoint of the highest step, and the torn ones of higher steps with the problems of each."""
    torn: dict[Path, list[str]] = {}
    for _, folder in reversed(numbered(run_dir)):
        wrong = problems(folder)
        if not wrong:
            return folder, torn
        torn[folder] = wrong
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
        written = next(name for name, was in saved.items() if was)
        raise ValueError(
            f"{folder} was saved under {written}, but this launch uses {now} and would continue with a new optimizer: "
            "resume with the original launch, or pass the folder as `model` and start a new run."
        )


def remedy(run_dir: Path, step: int) -> str:
    """How to continue after an error at this step; empty in the first step. Reads no files, which may be large."""
    if not step:
        return ""
    saved = [folder for number, folder in numbered(run_dir) if number <= step and has_manifest(folder)]
    if not saved:
        return f"{run_dir} has no checkpoint of this run to resume from: `save_steps` sets how often one is saved."
    return (
        f"To resume from {saved[-1]}, the newest checkpoint, pass `resume_from_checkpoint=True`, or on the command "
        "line `--resume_from_checkpoint true`."
    )


def _listed(torn: dict[Path, list[str]]) -> str:
    def shown(wrong: list[str]) -> str:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return "; ".join(wrong[:_SHOWN]) + more

    foreign = [folder for folder in torn if _is_foreign(folder)]
    said = "".join(f" {folder} is not complete: {shown(torn[folder])}." for folder in torn if folder not in foreign)
    if foreign:
        said += (
            f" {foreign[0]} has no {MANIFEST}, as checkpoints of TRL and `transformers`, so it cannot be checked for "
            f"completeness: to resume from it, pass its path, `resume_from_checkpoint={str(foreign[0])!r}`."
        )
    return said


def _is_foreign(folder: Path) -> bool:
    """Whether another trainer completed this checkpoint."""
    return not (folder / MANIFEST).exists() and (folder / _STATE).is_file()


def _alternative(run_dir: Path) -> str:
    newest, _ = newest_complete(run_dir)
    return f" The newest complete checkpoint there is {newest}." if newest else ""


# ---- Rates ----------------------------------------------------------------------------------------------------------
#
# transformers loads the optimizer with all its settings, whatever the options say, and takes the first step at the rate
# that the schedule of the earlier run had left.

Settings: TypeAlias = list[dict[str, Any]]
"""What is set of an optimizer, for each of its groups."""


def settings_of(optimizer: Any) -> Settings:
    """The settings of an optimizer that no schedule changes; the rate is the one a schedule multiplies.

    An optimizer that a launcher wraps may have no groups to look at.
    """

    def is_set(name: str, value: Any) -> bool:
        return name not in ("params", "param_names", "lr") and value is not None and not isinstance(value, bool)

    groups = getattr(optimizer, "param_groups", [])
    return [{name: value for name, value in one.items() if is_set(name, value)} for one in groups]


def not_taken(asked: Settings, loaded: Settings) -> str:
    """The settings that a checkpoint has overwritten, with both values; empty if there are none."""
    pairs = {
        f"{'learning_rate' if name == 'initial_lr' else name}={group[name]:g} instead of {value:g}"
        if isinstance(value, float)
        else f"{name}={group[name]} instead of {value}"
        for before, group in zip(asked, loaded, strict=False)
        for name, value in before.items()
        if name in group and group[name] != value
    }
    return ", ".join(sorted(pairs))


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
    if any(rate * factor(step) != 0 for step in range(steps) for rate, factor in pairs):
        return
    raise ValueError(
        f"The learning rate is 0 in all {steps} steps, so no weight would change: the schedule starts at 0, as a "
        "warmup does, and training ends before it rises, or it multiplies by 0. Set fewer `warmup_steps` or more "
        "steps, or pass another scheduler."
    )
