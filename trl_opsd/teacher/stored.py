"""Targets on disk: a dataset with a row for each text that a teacher has scored, looked up by what the teacher reads.

B rows · C completion tokens · N tokens that count, n of them of a row · W numbers of a target
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import pyarrow as pa
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetInfo, Features, List, Value
from datasets.fingerprint import Hasher
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trl_opsd.checkpoints import sync
from trl_opsd.options.rules import refuse
from trl_opsd.teacher.base import Teacher
from trl_opsd.types import OutputHead, Rollout, TeacherTargets
from trl_opsd.types.known import TokenHead
from trl_opsd.types.targets import Keeper

if TYPE_CHECKING:
    from trl_opsd.config import OPSDConfig

HEADER = "teachers.safetensors"
"""The heads of the teachers, and what their targets were made for; written before the first row."""
# Numbers as bytes: as lists, Arrow takes a thousand times as long to read them.
FEATURES = Features(
    {
        "teacher": Value("string"),
        "key": Value("string"),
        "prompt_ids": List(Value("int32")),
        "completion_ids": List(Value("int32")),
        "dtype": Value("string"),
        "targets": Value("large_binary"),
        "digest": Value("string"),
    }
)
"""`targets` are [C, W], `key` is of what the teacher has read, `digest` of the header and all other columns."""


def keys_of(rollout: Rollout) -> list[str]:
    """The key of each row: a digest of prompt, completion and images, as the teacher reads them."""
    images = [sorted(one.values.items()) if one else [] for one in rollout.images or [None] * len(rollout.prompt_ids)]
    rows = zip(rollout.prompt_lists(), rollout.completion_lists(), images, strict=True)
    return [
        _digest((prompt, completion, [name for name, _ in seen]), *(value for _, value in seen))
        for prompt, completion, seen in rows
    ]


class Store:
    """The targets in a folder; rows that are added are on disk once `flush` has returned.

    Raises:
        ValueError: A file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[tuple[str, str], tuple[pa.Table, int, Path]] = {}
        """By teacher and key."""
        self._added: dict[tuple[str, str], dict[str, Any]] = {}
        self.added_bytes = 0
        """Of the targets that are not on disk yet."""
        try:
            with safe_open(folder / HEADER, "pt") as file:
                self._said: dict[str, str] = file.metadata()
            self.header: dict[str, Any] = json.loads(self._said["header"])
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"`teacher_targets={str(folder)!r}` has no {HEADER} that can be read ({error}): expected a folder that "
                "`trl-opsd targets` has written."
            ) from None
        for path in sorted(folder.glob("part-*.arrow")):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            part: pa.Table = Dataset.from_file(str(path)).data.table
            part.validate(full=True)  # reading beyond the file would end the process
            for number, row in enumerate(zip(part["teacher"].to_pylist(), part["key"].to_pylist(), strict=True)):
                self.rows[row] = part, number, path
        except (OSError, KeyError, ValueError) as error:
            raise _damaged(path, error) from None

    def find(self, teacher: str, key: str) -> Tensor | None:
        """The targets of a teacher for each token of a completion, [C, W], read-only; `None` where it has none."""
        if (found := self.rows.get((teacher, key))) is None:
            return None
        part, number, path = found
        row = part.slice(number, 1)
        *said, digest = (column[0].as_py() for column in row.drop_columns("targets").columns)
        [targets] = row["targets"].chunks  # a scalar of Arrow would be a copy
        _, offsets, numbers = targets.buffers()
        start, end = np.frombuffer(offsets, np.int64)[targets.offset : targets.offset + 2].tolist()
        read = from_dlpack(pa.UInt8Array.from_buffers(pa.uint8(), end - start, [None, numbers], offset=start))
        if digest != _digest((self._said["digest"], said), read):
            raise _damaged(path, f"row {number} is not as it was written")
        *_, completion, dtype = said
        return read.view(getattr(torch, dtype)).view(len(completion), -1)

    def add(self, teacher: str, key: str, prompt: list[int], completion: list[int], states_CW: Tensor) -> None:
        """Adds the targets of a row, unless it has some."""
        if (teacher, key) not in self.rows:
            said, read = (
                [teacher, key, prompt, completion, str(states_CW.dtype).removeprefix("torch.")],
                _bytes(states_CW),
            )
            row = *said, read.numpy().tobytes(), _digest((self._said["digest"], said), read)
            self._added[teacher, key] = dict(zip(FEATURES, row, strict=True))
            self.added_bytes += len(read)

    def flush(self, least: int = 1) -> None:
        """Writes the rows that were added, where their targets have this many bytes."""
        if self.added_bytes < least:
            return
        path = self.folder / f"part-{Hasher.hash([*self._added])}.arrow"
        table = pa.Table.from_pylist(list(self._added.values()), schema=FEATURES.arrow_schema)
        publish(path, lambda beside: _write(table, beside))
        self._added, self.added_bytes = {}, 0
        self._open(path)

    def end(self) -> None:
        """Lists all parts as `datasets.load_from_disk` expects it."""
        files = [{"filename": path.name} for path in sorted(self.folder.glob("part-*.arrow"))]
        state = {"_data_files": files, "_fingerprint": Hasher.hash(files), "_format_kwargs": {}, "_split": None}
        text = json.dumps(state | {"_format_type": None, "_format_columns": None, "_output_all_columns": False})
        DatasetInfo(features=FEATURES).write_to_directory(self.folder)
        publish(self.folder / "state.json", lambda beside: beside.write_text(text, encoding="utf-8"))

    def heads(self, device: torch.device) -> dict[str, OutputHead]:
        """The head of each teacher."""
        found: dict[str, OutputHead] = {}
        with safe_open(self.folder / HEADER, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        if _digest((self._said["header"], [*tensors]), *tensors.values()) != self._said["digest"]:
            raise ValueError(
                f"{self.folder / HEADER} is not as it was written: write the targets again, to another folder."
            )
        for name, said in self.header["teachers"].items():
            if "known" in said["head"]:
                found[name] = TokenHead.sized(**said["head"], device=device)
            else:
                found[name] = OutputHead(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"), **said["head"]).to(
                    device
                )
        return found


def write_header(folder: Path, header: Mapping[str, Any], heads: Mapping[str, OutputHead]) -> None:
    """Writes what the targets are made for, and the heads of the teachers, which are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: head for name, head in heads.items() if not isinstance(head, TokenHead)}
    parts = {f"{name}.{part}": getattr(head, part) for name, head in own.items() for part in ("bias", "weight")}
    tensors = {name: one.detach().cpu().contiguous().clone() for name, one in sorted(parts.items()) if one is not None}
    text = json.dumps(header)
    said = {"header": text, "digest": _digest((text, [*tensors]), *tensors.values())}
    publish(folder / HEADER, lambda beside: save_file(tensors, beside, said))


def said_of_head(head: OutputHead) -> dict[str, Any]:
    """What there is to say of a head beside its tensors."""
    if isinstance(head, TokenHead):
        return {"vocabulary": head.weight.size(0), "known": head.weight.size(1) // 2}
    return {"scale": head.scale, "softcap": head.softcap}


def publish(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file beside its place, and renames it when it is on disk: it is there whole or not at all."""
    beside = path.with_name(f"unfinished-{PartialState().process_index}")  # where a run that was killed left one
    write(beside)
    sync(beside)
    os.replace(beside, path)
    sync(path.parent)


def _write(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _digest(said: object, *tensors: Tensor) -> str:
    """Of 64 bits: two of a million rows have the same one with a probability of 3e-8."""
    shapes = [(one.dtype, one.shape) for one in tensors]
    return str(Hasher.hash_bytes([repr((said, shapes)).encode(), *(_bytes(one).numpy() for one in tensors)]))


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(
        f"{path} is damaged ({why}): delete it, and run `trl-opsd targets` again, which writes what is missing."
    )


@final
class StoredTeacher(Teacher):
    """A teacher of whom the targets in a store are left."""

    reads_images: ClassVar[bool] = True

    def __init__(self, store: Store, name: str, head: OutputHead, cache_device: str = "auto") -> None:
        self.store, self.said = store, store.header["teachers"][name]
        self._name, self._head, self._cache_device = name, head, cache_device
        self.decode: Callable[[list[int]], str] = str

    def __str__(self) -> str:
        rows = sum(name == self._name for name, _ in self.store.rows)
        return f"{self.said['is']}: targets of {rows} rows in {str(self.store.folder)!r}"

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def context(self) -> int | None:
        context: int | None = self.said["context"]
        return context

    def targets(self, rollout: Rollout) -> TeacherTargets:
        found = [self.store.find(self._name, key) for key in keys_of(rollout)]
        counts = (rollout.weights.cpu() != 0).any(1).tolist()
        if missing := [row for row, one in enumerate(found) if one is None and counts[row]]:
            prompt, completion = (
                self.decode(one[missing[0]]) for one in (rollout.prompt_lists(), rollout.completion_lists())
            )
            raise ValueError(
                f"`teacher_targets={str(self.store.folder)!r}` has no targets of {self._name!r} for {len(missing)} of "
                f"{len(found)} rows, the first of which ends with {prompt[-60:]!r} before the completion "
                f"{completion[:60]!r}: run `trl-opsd targets` with these rows, which adds what is missing. A changed "
                "prompt, completion or `max_completion_length` needs new targets."
            )
        keeper = Keeper(rollout.weights, self._cache_device)
        nothing_0W = next((one for one in found if one is not None), self._head.weight)[:0]
        for row, known_CW in enumerate(found):
            keeper.put([row], (nothing_0W if known_CW is None else known_CW)[None])
        return keeper.targets()


def stored_teachers(args: OPSDConfig) -> dict[str, StoredTeacher]:
    """The teachers of `args.teacher_targets`, by name, in the order in which they were written."""
    store = Store(Path(str(args.teacher_targets)))
    what, is_begun = f"`teacher_targets={str(store.folder)!r}`", not (store.folder / "state.json").exists()
    refuse([(is_begun, what, "`trl-opsd targets` did not end there; run it again, which adds what is missing")])
    heads = store.heads(args.device)
    return {name: StoredTeacher(store, name, head, args.teacher_cache_device) for name, head in heads.items()}
