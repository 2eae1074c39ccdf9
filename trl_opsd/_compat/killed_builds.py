"""Finds locks of killed builds of DeepSpeed's C++ extensions, on which a run would wait forever without a message.

torch builds an extension on first use, under a lock that is a file. A process that is killed meanwhile leaves the file,
and every later one waits until somebody deletes it (`torch.utils.file_baton`). Since torch 2.14 the file always stays,
and its lock is one of the system's, which ends with the process.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch.utils import cpp_extension

from trl_opsd._compat.deepspeed import extension_names

LONGEST_BUILD = 600.0
"""Seconds after which a lock that no process here holds is a killed build's, even if another machine could hold it."""


def check_builds() -> None:
    """Raises `RuntimeError` for a lock that nobody holds; warns of one that another node may hold."""
    world = os.environ.get("WORLD_SIZE", "1")
    # On several nodes with a shared folder, another node's build looks like a killed one.
    several_nodes = os.environ.get("LOCAL_WORLD_SIZE", world) != world
    for lock, age in unheld_locks():
        message = (
            f"{lock} is {age:.0f} seconds old, the lock of a build of DeepSpeed's that no process of this machine is "
            "at: it was killed, or another machine builds in the same folder. A run waits for it without end or "
            "message: delete the file, unless another machine is at it."
        )
        if age > LONGEST_BUILD or not several_nodes:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)


def unheld_locks() -> list[tuple[Path, float]]:
    """Locks of DeepSpeed's extensions that no process of this machine has open, and their ages in seconds."""
    # torch 2.14 and later: the system releases a killed process's lock.
    if not hasattr(cpp_extension, "FileBaton"):
        return []
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    locks = [
        lock for name in extension_names() for folder in (name, f"*/{name}") for lock in root.glob(f"{folder}/lock")
    ]
    held = set(_open_files()) if locks else set()
    found = []
    for lock in locks:
        try:
            if str(lock.resolve()) not in held:
                found.append((lock, time.time() - lock.stat().st_mtime))
        except FileNotFoundError:  # the build ended meanwhile
            continue
    return found


def _open_files() -> Iterator[str]:
    """Paths of the files that this user's processes have open; none where the system has no `/proc`."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield os.readlink(entry)
        except OSError:  # of another user, or closed meanwhile
            continue
