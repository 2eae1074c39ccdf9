"""Teachers whose targets are on disk, or are being written to it.

B rows · C completion tokens · n tokens of a row that count · W numbers of a target
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from trl_opsd._compat.sharding import gathered_head, is_split_model
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.store import Described, Store, Writer, keys_of
from trl_opsd.types import LazyLogits, OutputHead, Rollout, RowTargets, TeacherTargets
from trl_opsd.types.known import TokenHead
from trl_opsd.types.targets import Keeper, kept_by_row

if TYPE_CHECKING:
    from trl_opsd.config import OPSDConfig


class MissingTargetsError(ValueError):
    """Rows have no targets; `prompt_ids` and `completion_ids` are those of the first."""

    def __init__(self, rows: int, prompt_ids: list[int], completion_ids: list[int]) -> None:
        super().__init__(f"{rows} rows have no targets, the first with the completion {completion_ids}")
        self.rows, self.prompt_ids, self.completion_ids = rows, prompt_ids, completion_ids


@final
class StoredTeacher(Teacher):
    """Answers with the targets of a store, for the rows that it has.

    Args:
        store ([`~teacher.store.Store`]):
            Has the targets of that teacher alone.
        head ([`~types.OutputHead`]):
            Turns them into logits.
        described ([`~teacher.store.Described`]), name (`str`):
            What the header of the folder says, and the teacher's name in it.
    """

    reads_images: ClassVar[bool] = True

    def __init__(
        self, store: Store, head: OutputHead, described: Described, name: str, cache_device: str = "auto"
    ) -> None:
        self.described, self.said = described, described.teachers[name]
        self._store, self._head, self._cache_device = store, head, cache_device

    def __str__(self) -> str:
        store = self._store
        return f"{self.said['is']}: targets of {len(store.rows)} rows, {store.tokens} tokens, in {str(store.folder)!r}"

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def context(self) -> int | None:
        context: int | None = self.said["context"]
        return context

    def missing(self, rollout: Rollout) -> list[int]:
        """The numbers of the rows with a token that counts and is not in the store."""
        return self._found(rollout)[1]

    def targets(self, rollout: Rollout) -> TeacherTargets:
        found, missing = self._found(rollout)
        if missing:
            first = rollout.select(missing[:1])
            raise MissingTargetsError(len(missing), first.prompt_lists()[0], first.completion_lists()[0])
        keeper, counts_BC = Keeper(rollout.weights, self._cache_device), rollout.weights.cpu() != 0
        like = next((one.hidden for one in found if one is not None), self.head.weight)
        for row, known in enumerate(found):
            places_n = counts_BC[row].nonzero().squeeze(1)
            states_1CW = torch.zeros(1, counts_BC.size(1), like.size(1), dtype=like.dtype)
            if known is not None and len(places_n):
                states_1CW[0, places_n] = known.hidden[torch.searchsorted(known.places, places_n)]
            keeper.put([row], states_1CW)
        return keeper.targets()

    def _found(self, rollout: Rollout) -> tuple[list[RowTargets | None], list[int]]:
        """The targets of each row, and the numbers of the rows that lack some of a token that counts."""
        found, missing = [self._store.find(key) for key in keys_of(rollout)], []
        for row, (known, counts_C) in enumerate(zip(found, rollout.weights.cpu() != 0, strict=True)):
            places_n = counts_C.nonzero().squeeze(1)
            if len(places_n) and (known is None or not torch.isin(places_n, known.places).all()):
                missing.append(row)
        return found, missing


@final
class WrittenTeacher(Teacher):
    """A teacher whose targets of all tokens are written as it makes them, and read where they have been.

    Args:
        teacher ([`Teacher`]):
            Scores rows. Where it is sharded, in all processes together.
        stored ([`StoredTeacher`]), writer ([`~teacher.store.Writer`]):
            Have the same store.
    """

    def __init__(self, teacher: Teacher, stored: StoredTeacher, writer: Writer) -> None:
        self.teacher, self._stored, self._writer = teacher, stored, writer
        self.missing = stored.missing

    @property
    def head(self) -> OutputHead:
        return self._stored.head

    @property
    def context(self) -> int | None:
        return self.teacher.context

    def targets(self, rollout: Rollout) -> TeacherTargets:
        # Every token, so that another choice of tokens finds them too.
        whole = replace(rollout, weights=rollout.generated.float())
        if not self.missing(whole):
            model = getattr(self.teacher, "model", None)
            if model is not None and is_split_model(model):
                self.teacher.targets(whole.select([0]))  # beside other processes
            return self._stored.targets(rollout)
        # The whole batch, as in a run without a store: rows that are read together are rounded alike.
        read = kept_by_row(self.teacher.targets(whole), whole.weights)
        rows = [self._as_kept(*one) for one in zip(read.rows or (), rollout.completion_ids, strict=True)]
        for key, row in zip(keys_of(rollout), rows, strict=True):
            self._writer.add(key, row)
        return TeacherTargets.by_row(rows, rollout.weights.size(1))

    def _as_kept(self, row: RowTargets, ids_C: Tensor) -> RowTargets:
        if not isinstance(self.head, TokenHead) or isinstance(theirs := self.teacher.head, TokenHead):
            return row
        vocabulary, width = self.head.weight.shape
        device = ids_C.device
        with gathered_head(theirs):
            model = LazyLogits(row.hidden.to(device), theirs.to(device))
            known = streamed_known(model, ids_C[row.places.to(device)], width // 2 - 1, vocabulary=vocabulary)
        return RowTargets(known.packed(), row.places)


def stored_teachers(args: OPSDConfig) -> dict[str, StoredTeacher]:
    """The teachers of `args.teacher_targets`, by name, in the order in which they were written.

    Raises:
        ValueError: A file of them cannot be read.
    """
    folder = Path(str(args.teacher_targets))
    described, found = Described.at(folder), {}
    for name, said in described.teachers.items():
        store = Store(described.folder_of(folder, name))
        head = store.head(said["head"], args.device)
        found[name] = StoredTeacher(store, head, described, name, args.teacher_cache_device)
    return found
