"""Records the files of a folder with their sizes and hashes, and detects missing or changed ones.

It knows files, not checkpoints. It detects damage, not tampering: whoever can change a file can change its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trl_opsd._compat import strict_json

MANIFEST = "opsd_manifest.json"
"""Lists every other file with its size and SHA-256; written last, so a checkpoint without it is torn."""

_RANK = re.compile(r"_(\d+)")
"""The rank in a per-process file name: `__1_0.distcp`, `zero_pp_rank_1_mp_rank_00_...`."""
_PIECE = 2**30
"""Bytes per hash, so that several threads can hash a large file."""
_MAX_BYTES = 64 * 2**20
"""Maximum size of a manifest that is read; one of a hundred thousand files has 15 MB."""


def entries(folder: Path, rank: int, processes: int, is_main: bool) -> dict[str, Any]:
    """Syncs this process's files of a folder, to which nothing is written any more, and returns their manifest entries.

    Its own are those with its rank in their names, as in `rng_state_1.pth`; the main process also takes all without a
    rank.
    """

    def is_own(path: Path) -> bool:
        found = _RANK.search(path.name)
        # A file without a rank is the main process's, as one with a number that is none.
        owner = int(found[1]) if found else processes
        return owner == rank or (owner >= processes and is_main)

    return _entries_of({name: path for name, path in _files(folder).items() if is_own(path)})


def seal(folder: Path, known: Mapping[str, Any]) -> None:
    """Writes the manifest of a folder, and syncs it to disk; files without an entry in `known` are hashed here."""
    files = _files(folder)
    here = {name: entry for name, entry in known.items() if name in files}
    here |= _entries_of({name: path for name, path in files.items() if name not in here})
    manifest = folder / MANIFEST
    with manifest.open("w", encoding="utf-8") as file:
        json.dump({"format": 1, "files": {name: here[name] for name in files}}, file, indent=1)
    sync(manifest)
    # A file is on disk only when the folder's entry for it is.
    for one in {folder, *(path.parent for path in files.values())}:
        sync(one)


def has_manifest(checkpoint: Path) -> bool:
    """Whether a folder has a manifest, even if its files have changed since."""
    return (checkpoint / MANIFEST).is_file()


def problems(checkpoint: Path) -> list[str]:
    """Lists what is missing from a checkpoint or differs from its manifest; empty if it is complete."""
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
        # Sizes first: contents are read only where all of them are right.
        if (size := found[name].stat().st_size) != expected[name][0]:
            wrong[name] = f"{name} has {size} bytes instead of {expected[name][0]}"
    if not wrong:
        digests = _digests({name: (found[name], size, len(hashes)) for name, (size, hashes) in expected.items()}, _try)
        for name, (_, hashes) in expected.items():
            if digests[name] != hashes:
                why = next((f" ({one})" for one in digests[name] if len(one) != 64), "")
                wrong[name] = f"{name} has other contents than were written{why}"
    return [wrong[name] for name in sorted(wrong)]


def _entries(manifest: Path) -> dict[str, tuple[int, list[str]]]:
    """Size and hashes of each file in a manifest; `ValueError` unless it has the format of [`seal`]."""
    if (size := manifest.stat().st_size) > _MAX_BYTES:
        raise ValueError(f"it has {size} bytes")
    contents = strict_json.loads(manifest.read_bytes())
    files = contents.get("files") if isinstance(contents, dict) else None
    if not isinstance(files, dict):
        raise ValueError("it lists no files")
    return {name: _entry(name, entry) for name, entry in files.items()}


def _entry(name: str, entry: Any) -> tuple[int, list[str]]:
    size, hashes = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    hashes = hashes if isinstance(hashes, list) else [hashes]
    if type(size) is not int or size < 0 or not all(isinstance(one, str) for one in hashes):
        raise ValueError(f"{name[:80]!r} has no size and hash")
    return size, hashes


def _files(folder: Path) -> dict[str, Path]:
    """Every file but the manifest, by its path relative to the folder."""
    paths = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    named = {path.relative_to(folder).as_posix(): path for path in sorted(paths) if path.is_file()}
    named.pop(MANIFEST, None)
    return named


def _entries_of(files: Mapping[str, Path]) -> dict[str, Any]:
    """Syncs files to disk, and returns their sizes and hashes: a large one has a list, one of each piece."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(sync, files.values()))
    sizes = {name: path.stat().st_size for name, path in files.items()}
    digests = _digests({name: (path, sizes[name], -(-sizes[name] // _PIECE)) for name, path in files.items()}, _sha256)
    return {
        name: {"bytes": sizes[name], "sha256": hashes if len(hashes) > 1 else hashes[0]}
        for name, hashes in digests.items()
    }


def _digests(
    files: Mapping[str, tuple[Path, int, int]], digest: Callable[[Path, int, int], str]
) -> dict[str, list[str]]:
    """Hashes of files in threads, by path, size, and number of hashes: one of the whole file, or of each piece."""
    with ThreadPoolExecutor() as pool:
        hashed = {
            name: [pool.submit(digest, path, start, _PIECE if hashes > 1 else size) for start in _starts(size, hashes)]
            for name, (path, size, hashes) in files.items()
        }
        return {name: [one.result() for one in each] for name, each in hashed.items()}


def _starts(size: int, hashes: int) -> range:
    return range(0, size, _PIECE) if hashes > 1 else range(1)


def _sha256(path: Path, start: int, length: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(min(length, 2**20)):
            digest.update(block)
            length -= len(block)
    return digest.hexdigest()


def _try(path: Path, start: int, length: int) -> str:
    """As [`_sha256`], or the reason why the file cannot be read."""
    try:
        return _sha256(path, start, length)
    except OSError as error:
        return str(error)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
