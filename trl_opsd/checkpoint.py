"""Gives a folder of files the name of a checkpoint once all of it is on disk, and tells a whole one from a torn one.

It knows files, not trainers. Whatever is killed, and whenever: a folder named `checkpoint-N` that was published here is
whole, and the checkpoint before it is still there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "opsd_manifest.json"
"""Every other file of a checkpoint with its size and SHA-256; written last, so without it a checkpoint is torn."""
UNFINISHED = "_unfinished"
"""Folder beside the checkpoints in which one is written. Uploads to the Hub leave out what starts with `_`."""

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"
"""What transformers writes last into a checkpoint of its own."""


def begin(run_dir: Path) -> Path:
    """Makes an empty folder to write a checkpoint in, beside those that are whole.

    Args:
        run_dir (`Path`):
            Where the checkpoints are.

    Returns:
        `Path`: The folder in which to make one named `checkpoint-N`.

    Raises:
        ValueError: A symlink stands where the folder has to be.
        OSError: The disk does not let us.
    """
    recover(run_dir)
    unfinished = run_dir / UNFINISHED
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    return unfinished


def publish(written: Path, run_dir: Path) -> Path:
    """Writes the manifest of what is in a folder, waits for the disk, and moves the folder among the checkpoints.

    One of the same name is replaced. If it was not made here, it is kept as `replaced-checkpoint-N`.

    Args:
        written (`Path`):
            A folder `checkpoint-N` under `run_dir`, on the same file system, into which nobody writes any more.
        run_dir (`Path`):
            Where the checkpoints are.

    Returns:
        `Path`: The checkpoint.
    """
    files = _files(written)
    with ThreadPoolExecutor() as pool:
        contents = dict(zip(files, pool.map(_settled, files.values()), strict=True))
    manifest = written / MANIFEST
    with manifest.open("w", encoding="utf-8") as file:
        json.dump({"format": 1, "files": contents}, file, indent=1)
    _settled(manifest)
    for folder in {written, *(path.parent for path in files.values())}:
        _sync_folder(folder)
    return _move_in(written, run_dir)


def recover(run_dir: Path) -> None:
    """Moves in what a killed process had finished, but for its name."""
    unfinished = run_dir / UNFINISHED
    if unfinished.is_symlink():
        raise ValueError(
            f"{unfinished} is a symlink: expected a folder of our own, in which checkpoints are written and from which "
            "they are deleted. Remove the link, or take another `output_dir`."
        )
    for _, folder in _numbered(unfinished):
        if not problems(folder):
            _move_in(folder, run_dir)


def problems(checkpoint: Path) -> list[str]:
    """What is missing from a checkpoint, or differs from its manifest; nothing if it is whole.

    Args:
        checkpoint (`Path`):
            Its folder.
    """
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return [f"{MANIFEST} is missing, so it was torn or written by something else"]
    try:
        expected: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        sizes = {name: int(entry["bytes"]) for name, entry in expected.items()}
        hashes = {name: str(entry["sha256"]) for name, entry in expected.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    found = _files(checkpoint)  # only what lies in the folder is ever opened, whatever a manifest names
    wrong = {name: f"{name} is missing" for name in sizes if name not in found}
    for name in sizes.keys() - wrong.keys():
        if (size := found[name].stat().st_size) != sizes[name]:
            wrong[name] = f"{name} has {size} bytes instead of {sizes[name]}"
    if not wrong:
        with ThreadPoolExecutor() as pool:
            for name, sha256 in zip(sizes, pool.map(_sha256, [found[name] for name in sizes]), strict=True):
                if sha256 != hashes[name]:
                    wrong[name] = f"{name} has other contents than were written"
    return [wrong[name] for name in sorted(wrong)]


def newest_complete(run_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The whole checkpoint of the highest step, and the torn ones above it with what is wrong with each.

    Args:
        run_dir (`Path`):
            Where the checkpoints are.
    """
    torn: dict[Path, list[str]] = {}
    for _, folder in sorted(_numbered(run_dir), reverse=True):
        wrong = problems(folder)
        if not wrong:
            return folder, torn
        torn[folder] = wrong
    return None, torn


def checked(asked: str | bool, run_dir: Path) -> tuple[Path, list[str]]:
    """The checkpoint to go on from, and what to tell the user about it.

    Args:
        asked (`str` or `bool`):
            The folder of a checkpoint, or `True` for the newest whole one.
        run_dir (`Path`):
            Where the checkpoints are.

    Raises:
        ValueError: There is none, or the one asked for is torn.
    """
    if asked is True:
        recover(run_dir)
        newest, torn = newest_complete(run_dir)
        if newest is None:
            raise ValueError(f"There is no complete checkpoint in {run_dir}.{_listed(torn)} {_HOW_TO_GO_ON}")
        return newest, [f"Going on from {newest}, the newest complete checkpoint.{_listed(torn)}"] if torn else []
    folder = Path(str(asked))
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}.{_alternative(folder.parent)} {_HOW_TO_GO_ON}")
    if not (folder / MANIFEST).exists() and (folder / _STATE).is_file():
        return folder, [f"{folder} has no {MANIFEST}, so nobody can say whether it is complete: going on from it."]
    if wrong := problems(folder):
        raise ValueError(f"{_listed({folder: wrong}).strip()}{_alternative(folder.parent)} {_HOW_TO_GO_ON}")
    return folder, []


def rotate(run_dir: Path, limit: int | None, keep: Collection[Path]) -> None:
    """Deletes the oldest checkpoints that were made here until at most `limit` are left.

    Args:
        run_dir (`Path`):
            Where the checkpoints are.
        limit (`int`, *optional*):
            How many may stay; `None` or 0 keeps them all.
        keep (`Collection[Path]`):
            Checkpoints that stay in any case: the newest, which is known to be whole, and the best.
    """
    ours = [folder for _, folder in sorted(_numbered(run_dir)) if _is_ours(folder)]
    ours.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime)  # a new run counts its steps from 0 again
    kept = {os.path.realpath(folder) for folder in keep}
    surplus = len(ours) - max(limit, 1) if limit else 0
    for folder in [folder for folder in ours if os.path.realpath(folder) not in kept][: max(surplus, 0)]:
        # Under its own name a checkpoint is whole or gone, also when this is where the process is killed.
        doomed = run_dir / UNFINISHED / f"deleted-{folder.name}"
        doomed.parent.mkdir(exist_ok=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    _remove(run_dir / UNFINISHED)


_HOW_TO_GO_ON = "Pass the path of a complete checkpoint, or train without `resume_from_checkpoint`."
_SHOWN = 3
"""Problems of one checkpoint that a message lists."""


def _listed(torn: dict[Path, list[str]]) -> str:
    def shown(wrong: list[str]) -> str:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return "; ".join(wrong[:_SHOWN]) + more

    return "".join(f" {folder} is not complete: {shown(wrong)}." for folder, wrong in torn.items())


def _alternative(run_dir: Path) -> str:
    newest, _ = newest_complete(run_dir)
    return f" The newest complete checkpoint there is {newest}." if newest else ""


def _move_in(written: Path, run_dir: Path) -> Path:
    checkpoint = run_dir / written.name
    replaced = written.parent / f"deleted-{written.name}"
    if os.path.lexists(checkpoint):
        os.rename(checkpoint, replaced if _is_ours(checkpoint) else _free_name(run_dir, checkpoint.name))
    # Killed between these two renames, `recover` does the second.
    os.rename(written, checkpoint)
    _sync_folder(run_dir)
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
    """Whether it may be deleted: it has our manifest, or there is nothing in it."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return False
    names = os.listdir(checkpoint)
    return MANIFEST in names or not names


def _remove(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir()]


def _files(folder: Path) -> dict[str, Path]:
    """Every file but the manifest, by its name relative to the folder."""
    paths = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    named = {path.relative_to(folder).as_posix(): path for path in sorted(paths) if path.is_file()}
    named.pop(MANIFEST, None)
    return named


def _settled(path: Path) -> dict[str, Any]:
    """Waits until a file is on disk; its size and hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
