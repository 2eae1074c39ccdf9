"""A teacher whose targets are on disk: alone, as a cache before another teacher, or while these are written.

B rows · C completion tokens · n tokens of a row that count · W numbers of a target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from trl_opsd._compat.sharding import gathered_head, is_split_model
from trl_opsd.losses.streamed import streamed_known
from trl_opsd.teacher.base import Teacher, innermost
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
    """Answers with the targets of a store, and for other rows with those of a teacher, if there is one.

    Args:
        store ([`~teacher.store.Store`]):
            Has the targets of that teacher alone.
        head ([`~types.OutputHead`]):
            Turns them into logits.
        described ([`~teacher.store.Described`]), name (`str`):
            What the header of the folder says, and the teacher's name in it.
        teacher ([`Teacher`], *optional*):
            Scores rows that the store does not have. Where it is sharded, in all processes together.
        writer ([`~teacher.store.Writer`], *optional*):
            Adds all tokens of these rows to the store.
    """

    reads_images: ClassVar[bool] = True

    def __init__(
        self,
        store: Store,
        head: OutputHead,
        described: Described,
        name: str,
        teacher: Teacher | None = None,
        writer: Writer | None = None,
        cache_device: str = "auto",
    ) -> None:
        self.teacher, self.described, self.said = teacher, described, described.teachers[name]
        self._store, self._head, self._writer, self._cache_device = store, head, writer, cache_device
        self.asked = self.hits = 0
        """Requested rows, and those that the store had."""

    def __str__(self) -> str:
        known = f"targets of {len(self._store.rows)} rows, {self._store.tokens} tokens, in {str(self._store.folder)!r}"
        return f"{self.teacher}, after {known}" if self.teacher is not None else f"{self.said['is']}: {known}"

    def __getattr__(self, name: str) -> Any:
        # What the teacher behind it has beside its targets, for instance its model, with which it generates.
        if name == "teacher" or self.teacher is None:
            raise AttributeError(f"`StoredTeacher` has no attribute `{name}`.")
        return getattr(self.teacher, name)

    @property
    def head(self) -> OutputHead:
        return self._head if self.teacher is None or self._writer is not None else self.teacher.head

    @property
    def context(self) -> int | None:
        context: int | None = self.said["context"] if self.teacher is None else self.teacher.context
        return context

    def missing(self, rollout: Rollout) -> list[int]:
        """The numbers of the rows with a token that counts and is not in the store."""
        return _missing(rollout, self._found(keys_of(rollout)))

    def targets(self, rollout: Rollout) -> TeacherTargets:
        # A writer has every token read, so that another choice of tokens finds them too.
        whole = rollout if self._writer is None else replace(rollout, weights=rollout.generated.float())
        found = self._found(keys := keys_of(rollout))
        missing = _missing(whole, found)
        self.asked, self.hits = self.asked + len(rollout.weights), self.hits + len(rollout.weights) - len(missing)
        read: list[int] = missing
        if self._writer is not None and missing:
            # The whole batch, as in a run without a store: rows that are read together are rounded alike.
            read = list(range(len(rollout.weights)))
        elif not missing and _is_collective(self.teacher):
            read = [0]
        theirs: dict[int, RowTargets] = {}
        if read and self.teacher is None:
            first = rollout.select(read[:1])
            raise MissingTargetsError(len(read), first.prompt_lists()[0], first.completion_lists()[0])
        if read:
            assert self.teacher is not None, "refused above"
            of_theirs = whole.select(read)
            targets = kept_by_row(self.teacher.targets(of_theirs), of_theirs.weights)
            theirs = dict(zip(read, targets.rows or (), strict=True))
        if self._writer is not None:
            theirs = self._written(whole, keys, theirs)
        return self._joined(rollout, [theirs.get(row, one) for row, one in enumerate(found)])

    def expect(self, rollout: Rollout) -> None:
        if self.teacher is not None and (missing := self.missing(rollout)):
            self.teacher.expect(rollout.select(missing))

    def forget_expected(self) -> None:
        if self.teacher is not None:
            self.teacher.forget_expected()

    def _found(self, keys: Sequence[bytes]) -> list[RowTargets | None]:
        return [self._store.find(key) for key in keys]

    def _joined(self, rollout: Rollout, each: Sequence[RowTargets | None]) -> TeacherTargets:
        """The targets of the tokens that count, from those of each row."""
        keeper, counts_BC = Keeper(rollout.weights, self._cache_device), rollout.weights.cpu() != 0
        like = next((one.hidden for one in each if one is not None), self.head.weight)
        for row, known in enumerate(each):
            places_n = counts_BC[row].nonzero().squeeze(1)
            states_1CW = torch.zeros(1, counts_BC.size(1), like.size(1), dtype=like.dtype)
            if known is not None and len(places_n):
                at_n = torch.searchsorted(known.places, places_n)
                states_1CW[0, places_n] = known.hidden.index_select(0, at_n.to(known.hidden.device)).cpu()
            keeper.put([row], states_1CW)
        return keeper.targets()

    def _written(
        self, rollout: Rollout, keys: Sequence[bytes], theirs: Mapping[int, RowTargets]
    ) -> dict[int, RowTargets]:
        """The same rows as the store keeps them, which has them from now on."""
        assert self._writer is not None, "called while targets are written"
        found = {}
        for number, row in theirs.items():
            found[number] = self._as_kept(row, rollout.completion_ids[number])
            self._writer.add(keys[number], found[number])
        return found

    def _as_kept(self, row: RowTargets, ids_C: Tensor) -> RowTargets:
        assert self.teacher is not None, "what is written comes from a teacher"
        if not isinstance(self._head, TokenHead) or isinstance(theirs := self.teacher.head, TokenHead):
            return row
        vocabulary, width = self._head.weight.shape
        device = ids_C.device
        with gathered_head(theirs):
            model = LazyLogits(row.hidden.to(device), theirs.to(device))
            known = streamed_known(model, ids_C[row.places.to(device)], width // 2 - 1, vocabulary=vocabulary)
        return RowTargets(known.packed(), row.places)


def _is_collective(teacher: Teacher | None) -> bool:
    """Whether it reads rows in all processes together."""
    model = None if teacher is None else getattr(innermost(teacher), "model", None)
    return model is not None and is_split_model(model)


def _missing(rollout: Rollout, found: Sequence[RowTargets | None]) -> list[int]:
    """The numbers of the rows with a token that counts, and no targets of it."""
    places = [counts_C.nonzero().squeeze(1) for counts_C in rollout.weights.cpu() != 0]
    return [row for row, (one, places_n) in enumerate(zip(found, places, strict=True)) if not _has(one, places_n)]


def _has(found: RowTargets | None, places_n: Tensor) -> bool:
    """Whether a row of a store has the targets of these tokens; it need not be there if there are none."""
    return not len(places_n) or (found is not None and bool(torch.isin(places_n, found.places).all()))


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
        found[name] = StoredTeacher(store, head, described, name, cache_device=args.teacher_cache_device)
    return found


def live(teacher: Any) -> Any:
    """The teacher behind a store, if there is one."""
    return teacher.teacher or teacher if isinstance(teacher, StoredTeacher) else teacher


def before(teachers: Mapping[str, Teacher], args: OPSDConfig) -> dict[str, Teacher]:
    """Teachers with the store of each before it; `ValueError` where it has not the states of all.

    Without `args.teacher_targets`, or where these are such teachers already, as they are.
    """
    if args.teacher_targets is None or any(isinstance(one, StoredTeacher) for one in teachers.values()):
        return dict(teachers)
    stored = stored_teachers(args)
    named = f"`teacher_targets={args.teacher_targets!r}`"
    if unknown := sorted(set(teachers) - set(stored)):
        raise ValueError(f"{named} has targets of {sorted(stored)}, but there are teachers {unknown}: use their names.")
    for name, teacher in teachers.items():
        if isinstance(teacher.head, TokenHead) or isinstance(stored[name].head, TokenHead):
            raise ValueError(
                f"{named} beside the teacher {name!r}: expected hidden states of both, as a batch has one head, but "
                "of one some tokens are known: write `--format states`, or remove the teacher."
            )
        if (here := str(teacher.head.weight.dtype)) != stored[name].said["dtype"]:
            raise ValueError(
                f"{named} was written by a teacher in {stored[name].said['dtype']}, but {name!r} is in {here} here: "
                "set its dtype in `teacher_model_init_kwargs`, or write them again."
            )
        stored[name].teacher = teacher
    return {name: stored[name] for name in teachers}
