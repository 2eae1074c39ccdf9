"""Records the files of a folder with their sizes and hashes, and later reports what is missing or has changed.

It knows files, not checkpoints. It detects damage, not tampering: whoever can change a file can change its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trl_opsd.run import strict_json

MANIFEST = "opsd_manifest.json"
"""Lists every other file of a checkpoint with its size and SHA-256; written last, so without it a checkpoint is torn.
"""

_MAX_BYTES = 64 * 2**20
"""Maximum size of a manifest that is read; one of a hundred thousand files has 15 MB."""


def seal(folder: Path) -> None:
    """Writes the manifest of a folder, and syncs all of it to disk.

    Args:
        folder (`Path`):
            A folder to which nothing is written any more.
    """
    files = _files(folder)
    with ThreadPoolExecutor() as pool:
        contents = dict(zip(files, pool.map(_synced_entry, files.values()), strict=True))
    manifest = folder / MANIFEST
    with manifest.open("w", encoding="utf-8") as file:
        json.dump({"format": 1, "files": contents}, file, indent=1)
    _synced_entry(manifest)
    for one in {folder, *(path.parent for path in files.values())}:
        sync_folder(one)


def has_manifest(checkpoint: Path) -> bool:
    """Whether a folder has a manifest, even if its files have changed since."""
    return (checkpoint / MANIFEST).is_file()


def problems(checkpoint: Path) -> list[str]:
    """Lists what is missing from a checkpoint or differs from its manifest; empty if it is complete.

    Args:
        checkpoint (`Path`):
            Its folder.
    """
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return [f"{MANIFEST} is missing, so it was torn or written by something else"]
    try:
        expected = _entries(manifest)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]
    found = _files(checkpoint)  # only files inside the folder are opened, whatever paths a manifest contains
    wrong = {name: f"{name} is missing" for name in expected if name not in found}
    for name in expected.keys() - wrong.keys():
        if (size := found[name].stat().st_size) != expected[name][0]:
            wrong[name] = f"{name} has {size} bytes instead of {expected[name][0]}"
    if not wrong:
        with ThreadPoolExecutor() as pool:
            for name, sha256 in zip(
                expected, pool.map(_sha256_or_why, [found[name] for name in expected]), strict=True
            ):
                if sha256 != expected[name][1]:
                    other = f"has other contents than were written{'' if len(sha256) == 64 else f' ({sha256})'}"
                    wrong[name] = f"{name} {other}"
    return [wrong[name] for name in sorted(wrong)]


def _entries(manifest: Path) -> dict[str, tuple[int, str]]:
    """Size and hash of each file in a manifest.

    Raises:
        ValueError: It does not have the format written here.
    """
    if (size := manifest.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"it has {size} bytes")
    contents = strict_json.loads(manifest.read_bytes())
    files = contents.get("files") if isinstance(contents, dict) else None
    if not isinstance(files, dict):
        raise ValueError("it lists no files")
    return {name: _entry(name, entry) for name, entry in files.items()}


def _entry(name: str, entry: Any) -> tuple[int, str]:
    size, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(sha256, str):
        raise ValueError(f"{name[:80]!r} has no size and hash")
    return size, sha256


def _files(folder: Path) -> dict[str, Path]:
    """Every file but the manifest, by its path relative to the folder."""
    paths = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    named = {path.relative_to(folder).as_posix(): path for path in sorted(paths) if path.is_file()}
    named.pop(MANIFEST, None)
    return named


def _synced_entry(path: Path) -> dict[str, Any]:
    """Syncs a file to disk, and returns its size and hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_or_why(path: Path) -> str:
    try:
        return _sha256(path)
    except OSError as error:
        return str(error)


def sync_folder(folder: Path) -> None:
    """Syncs the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
