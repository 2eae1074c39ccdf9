"""Targets on disk: rows of one teacher in shards that are written whole or not at all, found by what the teacher read.

N tokens of a shard · n tokens of a row · W numbers of a target
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trl_opsd.checkpoints import sync
from trl_opsd.types import OutputHead, Rollout, RowTargets
from trl_opsd.types.known import TokenHead

HEADER = "opsd_targets.json"
"""Describes the targets of a folder and their teachers; written before the first shard."""
_HEAD, _SHARD = "head.safetensors", "shard-*.safetensors"
_SHARD_BYTES = 256_000_000
"""Targets that are written at once, and lost where a run is killed."""
_OPEN = 64
"""Shards that are mapped at a time."""
_KEY = 16
"""Bytes of a row's key: two of a thousand million rows have the same one with a probability of 1e-21."""


def keys_of(rollout: Rollout) -> list[bytes]:
    """The key of each row: a digest of prompt, completion and images, as the teacher reads them."""
    lists = zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True)
    images = rollout.images or [None] * len(rollout.prompt_ids)
    found = []
    for (prompt, completion), seen in zip(lists, images, strict=True):
        key = blake2b(np.array([len(prompt), *prompt, *completion], np.int64).tobytes(), digest_size=_KEY)
        for name, value in sorted((seen.values if seen else {}).items()):
            key.update(name.encode() + str((value.dtype, *value.shape)).encode())
            key.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found.append(key.digest())
    return found


@dataclass(frozen=True, slots=True)
class Described:
    """What the header of a folder says."""

    format: str
    """`"states"` or `"topk"`."""
    top_k: int | None
    made_for: Mapping[str, str]
    """What has to be the same in a run that reads them: tokenizer, templates."""
    made_with: Mapping[str, str]
    """What may differ: versions, processes."""
    teachers: Mapping[str, Mapping[str, Any]]
    """By name: what a fingerprint says of each, its context, and how its head turns states into logits."""

    @classmethod
    def at(cls, folder: Path) -> Described:
        """Reads a header.

        Raises:
            ValueError: There is none, or it is not of this format.
        """
        try:
            return cls(**json.loads((folder / HEADER).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"`teacher_targets={str(folder)!r}` has no {HEADER} that can be read ({error}): expected a folder that "
                "`trl-opsd targets` has written."
            ) from None

    def write(self, folder: Path) -> None:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        text = json.dumps(values, indent=2) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        publish(folder / HEADER, lambda path: path.write_text(text, encoding="utf-8"))

    def differences(self, now: Mapping[str, str]) -> list[str]:
        """A line for each thing that is another now than it was."""
        names = sorted({*self.made_for, *now})
        pairs = {name: (self.made_for.get(name), now.get(name)) for name in names}
        return [f"  {name}: {then!r} there, {here!r} here" for name, (then, here) in pairs.items() if then != here]

    def folder_of(self, folder: Path, name: str) -> Path:
        """Where the shards of a teacher are, whose name may be no name of a folder."""
        return folder / f"teacher-{sorted(self.teachers).index(name)}"


class Store:
    """The targets of one teacher, in a folder of its own; has what was written before it was opened, and its own.

    Raises:
        ValueError: A shard is cut or is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[bytes, tuple[Path, int]] = {}
        """The shard of each row, and its number there."""
        self.tokens = 0
        # Of this object: the folder may be deleted and written again in one process.
        self._mapped = lru_cache(_OPEN)(lambda path: safe_open(path, "pt"))
        self._tensor = lru_cache(4 * _OPEN)(lambda path, name: self._mapped(path).get_tensor(name))
        self._known: set[Path] = set()
        self.refresh()

    def refresh(self) -> None:
        """Adds what other processes have written since."""
        for path in sorted(set(self.folder.glob(_SHARD)) - self._known):
            self.index(path)

    def index(self, path: Path) -> None:
        """Adds the rows of a shard."""
        try:
            keys, ends = (self._tensor(path, name) for name in ("keys", "ends"))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} is no whole shard of targets ({error}): delete it, and run `trl-opsd targets` again, which "
                "makes what is missing."
            ) from None
        self._known.add(path)
        for number, key in enumerate(keys.numpy()):
            self.rows[key.tobytes()] = path, number
        self.tokens += int(ends[-1])

    def find(self, key: bytes) -> RowTargets | None:
        """The targets of a row, mapped from disk: `hidden` [n, W]; `None` where it has none."""
        if (found := self.rows.get(key)) is None:
            return None
        path, number = found
        ends = self._tensor(path, "ends")
        row = slice(int(ends[number - 1]) if number else 0, int(ends[number]))
        return RowTargets(self._mapped(path).get_slice("targets")[row], self._tensor(path, "places")[row].long())

    # ---- The head ---------------------------------------------------------------------------------------------------

    def write_head(self, head: OutputHead) -> None:
        """Writes the head's tensors, which are whole."""
        if isinstance(head, TokenHead):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
        whole = {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
        publish(self.folder / _HEAD, lambda path: save_file(whole, path))

    def head(self, said: Mapping[str, Any], device: torch.device) -> OutputHead:
        """The head, from its tensors and what [`said_of_head`] has said."""
        if "known" in said:
            return TokenHead.sized(said["vocabulary"], said["known"], device)
        try:
            with safe_open(self.folder / _HEAD, "pt") as file:
                tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.folder / _HEAD} cannot be read ({error}): write the targets again.") from None
        return OutputHead(tensors["weight"], tensors.get("bias"), said["scale"], said["softcap"])


def said_of_head(head: OutputHead) -> dict[str, Any]:
    """What there is to say of a head beside its tensors."""
    if isinstance(head, TokenHead):
        vocabulary, width = head.weight.shape
        return {"vocabulary": vocabulary, "known": width // 2}
    return {"scale": head.scale, "softcap": head.softcap}


class Writer:
    """Adds rows to a store: each is on disk once its shard is, which `flush` ends."""

    def __init__(self, store: Store, process: int) -> None:
        self.store, self._process = store, process
        self._waiting: dict[bytes, RowTargets] = {}
        self.waiting_bytes = self.tokens = 0
        """Of the rows that wait; of all that were added."""
        store.folder.mkdir(parents=True, exist_ok=True)
        for path in store.folder.glob(f"*.{process}.unfinished"):  # of a run that was killed
            path.unlink()

    def add(self, key: bytes, row: RowTargets) -> None:
        """Adds the targets of a row, unless it has some."""
        if key not in self._waiting and key not in self.store.rows:
            self._waiting[key] = RowTargets(row.hidden.cpu().clone(), row.places)
            self.waiting_bytes += row.hidden.nbytes
            self.tokens += len(row.places)
            if self.waiting_bytes >= _SHARD_BYTES:
                self.flush()

    def flush(self) -> None:
        """Writes the rows that wait.

        Raises:
            OSError: The disk is full; all rows before these are kept.
        """
        if not self._waiting:
            return
        rows = list(self._waiting.values())
        numbers = [int(path.stem.split("-")[-1]) for path in self.store.folder.glob(f"shard-{self._process}-*")]
        path = self.store.folder / f"shard-{self._process}-{max(numbers, default=-1) + 1:06d}.safetensors"
        tensors = {
            "targets": torch.cat([row.hidden for row in rows]),
            "places": torch.cat([row.places for row in rows]).int(),
            "keys": torch.from_numpy(np.frombuffer(b"".join(self._waiting), np.uint8).reshape(-1, _KEY).copy()),
            "ends": torch.tensor([len(row.places) for row in rows]).cumsum(0),
        }
        publish(path, lambda to: save_file(tensors, to), self._process)
        self._waiting, self.waiting_bytes = {}, 0
        self.store.index(path)


def publish(path: Path, write: Callable[[Path], Any], process: int = 0) -> None:
    """Writes a file beside its place, and renames it when it is on disk: it is there whole or not at all."""
    beside = path.with_name(f"{path.name}.{process}.unfinished")
    try:
        write(beside)
        sync(beside)
        os.replace(beside, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            beside.unlink()
        raise OSError(
            f"{path} cannot be written ({error}): what was written before is kept, and the same command goes on from "
            "there once there is room."
        ) from error
