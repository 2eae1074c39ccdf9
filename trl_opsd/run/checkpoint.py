"""Gives a folder of files the name of a checkpoint once all of it is on disk, and tells a whole one from a torn one.

It knows files, not trainers. Whatever is killed, and whenever: a folder named `checkpoint-N` that was published here is
whole, and the checkpoint before it is still there.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from trl_opsd.run.manifest import MANIFEST, has_manifest, problems, seal, sync_folder

UNFINISHED = "_unfinished"
"""Folder beside the checkpoints in which one is written. Uploads to the Hub leave out what starts with `_`."""

_NAME = re.compile(r"checkpoint-(\d+)")
_MADE_ASIDE = re.compile(r"(deleted-)?checkpoint-\d+")
"""What is written or deleted in the folder for unfinished ones. Nothing else in it is touched."""
_STATE = "trainer_state.json"
"""What transformers writes last into a checkpoint of its own."""


def begin(run_dir: Path) -> Path:
    """Makes a folder to write a checkpoint in, beside those that are whole, without one that was begun before.

    Args:
        run_dir (`Path`):
            Where the checkpoints are.

    Returns:
        `Path`: The folder in which to make one named `checkpoint-N`.

    Raises:
        ValueError: Something else stands where the folder has to be.
        OSError: The disk does not let us.
    """
    recover(run_dir)
    unfinished = run_dir / UNFINISHED
    unfinished.mkdir(parents=True, exist_ok=True)
    _clear(unfinished)
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
    seal(written)
    return _move_in(written, run_dir)


def recover(run_dir: Path) -> None:
    """Moves in what a killed process had finished, but for its name."""
    unfinished = run_dir / UNFINISHED
    if unfinished.is_symlink() or (unfinished.exists() and not unfinished.is_dir()):
        raise ValueError(
            f"{unfinished} is a {'symlink' if unfinished.is_symlink() else 'file'}: expected a folder of our own, in "
            "which checkpoints are written and from which they are deleted. Remove it, or take another `output_dir`."
        )
    for _, folder in _numbered(unfinished):
        if not folder.is_symlink() and not problems(folder):
            _move_in(folder, run_dir)


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


def rotate(run_dir: Path, limit: int | None, keep: Collection[Path]) -> list[str]:
    """Deletes the oldest checkpoints that were made here until at most `limit` are left.

    Args:
        run_dir (`Path`):
            Where the checkpoints are.
        limit (`int`, *optional*):
            How many may stay; `None` or 0 keeps them all.
        keep (`Collection[Path]`):
            Checkpoints that stay in any case: the newest, which is known to be whole, and the best.

    Returns:
        `list[str]`: what could not be deleted, and why. It stays, and so does the run.
    """
    # An empty folder is what a killed run of somebody else's trainer leaves: it is no checkpoint, and not in the way.
    ours = [folder for _, folder in sorted(_numbered(run_dir)) if not folder.is_symlink() and has_manifest(folder)]
    ours.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime)  # a new run counts its steps from 0 again
    kept = {os.path.realpath(folder) for folder in keep}
    surplus = len(ours) - max(limit, 1) if limit else 0
    remarks = []
    for folder in [folder for folder in ours if os.path.realpath(folder) not in kept][: max(surplus, 0)]:
        # Under its own name a checkpoint is whole or gone, also when this is where the process is killed.
        doomed = run_dir / UNFINISHED / f"deleted-{folder.name}"
        doomed.parent.mkdir(exist_ok=True)
        try:
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            remarks.append(f"{folder} should go (`save_total_limit={limit}`), but cannot be deleted: {error}.")
    _close(run_dir / UNFINISHED)
    return remarks


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
    sync_folder(run_dir)
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
    return has_manifest(checkpoint) or not os.listdir(checkpoint)


def _clear(unfinished: Path) -> None:
    """Deletes what was begun there. What has such a name and is not ours is moved among the checkpoints."""
    for path in [unfinished / name for name in os.listdir(unfinished) if _MADE_ASIDE.fullmatch(name)]:
        if path.is_symlink() or not path.is_dir():
            os.rename(path, _free_name(unfinished.parent, path.name))
        else:
            shutil.rmtree(path)


def _close(unfinished: Path) -> None:
    """Deletes what is left there of ours, and the folder unless it holds something else."""
    if not unfinished.exists():
        return
    with suppress(OSError):  # what cannot be deleted was remarked on, and the next save tries again
        _clear(unfinished)
        unfinished.rmdir()


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir()]
