"""Publishes a checkpoint by renaming a complete folder, and tells complete checkpoints from torn ones.

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
from uuid import uuid4

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments

from trl_opsd._compat.versions import versions
from trl_opsd.errors import OPSDError

MANIFEST = "opsd_manifest.json"
"""Lists every other file with its size, and the versions that wrote it; written last: without it, one is torn."""
FORMAT = 2
"""Of the manifest: 1 had digests, which are not read."""

UNFINISHED = "_unfinished"
"""Folder beside the checkpoints in which one is written. Uploads to the Hub skip names that start with `_`."""

_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = re.compile(r"(deleted-)?checkpoint-\d+")
"""Names in `UNFINISHED` that are ours to delete. Nothing else in it is touched."""
_DELAY = 5.0
"""Seconds until a file on a network disk is visible to other machines."""


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


def written_otherwise(checkpoint: Path) -> str:
    """The versions that wrote a complete checkpoint, where they differ from those installed; else empty."""
    then, now = json.loads((checkpoint / MANIFEST).read_bytes()).get("versions"), versions()
    if not isinstance(then, dict):
        return ""  # of an older version of this package
    return ", ".join(f"{name} {was} (now {now.get(name)})" for name, was in then.items() if was != now.get(name))


def problems(checkpoint: Path) -> list[str]:
    """Lists what is missing from a checkpoint or has another size than in its manifest; empty if it is complete."""
    if not has_manifest(checkpoint):
        return [f"{MANIFEST} is missing: it is incomplete or was written by another program"]
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        if (newer := int(manifest.get("format", FORMAT))) > FORMAT:
            return [f"{MANIFEST} has the format {newer!r} of a newer version of trl_opsd: resume with that version"]
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
        json.dump({"format": FORMAT, "versions": versions(), "files": sizes}, file, indent=1)
    for one in (manifest, written):
        sync(one)
    return _move_in(written, run_dir)  # on the same file system, under `run_dir`, so that a rename is atomic


def recover(run_dir: Path) -> None:
    """Publishes checkpoints that a killed process had completed but not yet renamed."""
    unfinished = run_dir / UNFINISHED
    if unfinished.is_symlink() or (unfinished.exists() and not unfinished.is_dir()):
        raise ValueError(
            f"{unfinished} is a {'symlink' if unfinished.is_symlink() else 'file'}: expected a folder that this "
            "trainer created for unfinished checkpoints. Remove it, or use another `output_dir`."
        )
    # A manifest is written last, so a folder without problems was complete when the process was killed.
    for _, folder in numbered(unfinished):
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
