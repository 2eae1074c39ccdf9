"""A teacher with a tokenizer of its own: reads completions as its own tokens, and answers for each of their bytes.

P byte positions of a row · n tokens of the teacher in it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import final

import torch
from torch import Tensor

from trl_opsd.data.byte_vocabulary import ByteVocabulary, valid_text
from trl_opsd.losses.bytewise import MOST_ESCAPE, byte_logarithms
from trl_opsd.models.backbone import gathered_head, shape_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.teachers import check_depends_on_input, prove_alignment, scored
from trl_opsd.types import LazyLogits, OutputHead, Rollout, TeacherTargets
from trl_opsd.types.bytewise import OUTCOMES, ByteTargets, byte_head
from trl_opsd.types.targets import fetch, has_streams, kept_by_row, targets_device

_ROWS = 8
"""Rows whose states and distributions are on the device at a time."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One completion as both models read it."""

    ids: list[int]
    """The teacher's tokens."""
    positions: int
    """Byte positions of these."""
    token_P: Tensor
    """The number of the student's token of each byte position that both have."""
    reads: Tensor
    """Of the student, as [`~types.bytewise.ByteTargets.reads`]."""


@final
class ByteTeacher(Teacher):
    """Turns the targets of another teacher into its distributions over the next byte.

    Args:
        teacher ([`Teacher`]):
            Reads its own tokens.
        student, its ([`~data.byte_vocabulary.ByteVocabulary`]):
            What the tokens of the student and of the teacher stand for.
        temperature (`Callable`):
            The teacher's softmax temperature, as it is now.
        chunk_tokens (`int`, *optional*):
            Tokens whose logits exist at a time.
        cache_device (`str`, *optional*, defaults to `"auto"`):
            Where targets are kept until they are used: see `OPSDConfig.teacher_cache_device`.
    """

    def __init__(
        self,
        teacher: Teacher,
        student: ByteVocabulary,
        its: ByteVocabulary,
        temperature: Callable[[], float],
        chunk_tokens: int | None = None,
        cache_device: str = "auto",
    ) -> None:
        self.teacher, self._student, self._its = teacher, student, its.within(shape_of(teacher.head)[0])
        self._temperature, self._chunk_tokens, self._cache_device = temperature, chunk_tokens, cache_device
        # The teachers of this package align their targets.
        self._is_unproved = not str(type(teacher).targets.__module__).startswith(str(__package__))

    def __str__(self) -> str:
        return f"{self.teacher}, by bytes"

    @property
    def spelling(self) -> str:
        """What its tokens and the student's stand for, as a digest."""
        return f"tokens of sha256 {self._its.digest[:16]} by those of {self._student.digest[:16]}"

    @property
    def head(self) -> OutputHead:
        return byte_head(self.teacher.head.weight.device)

    @property
    def context(self) -> int | None:
        return self.teacher.context

    def targets(self, rollout: Rollout) -> TeacherTargets:
        ended, context = rollout.ended(), self.context
        rooms = [None if context is None else context - length.prompt for length in ended.measured()]
        readings = self._read(rollout.completion_lists(), [*map(len, ended.completion_lists())], rooms)
        theirs = _as_its_own(rollout, [one.ids for one in readings])
        found = scored(self.teacher, theirs)
        check_depends_on_input(theirs, found, type(self.teacher).__name__)
        if self._is_unproved:
            name = f"{type(self.teacher).__name__}.targets"
            prove_alignment(partial(scored, self.teacher), theirs, found, name)
            self._is_unproved = False
        rows = kept_by_row(found, theirs.weights).rows or ()
        positions, escapes = [one.positions for one in readings], list[Tensor]()
        with gathered_head(head := self.teacher.head):
            head = head.to(device := rollout.weights.device)
            shape = (sum(positions), OUTCOMES)
            kept = targets_device(self._cache_device, 4 * shape[0] * shape[1], device)
            logs_PO = torch.empty(shape, device=kept, pin_memory=kept.type == "cpu" and has_streams(device))
            at = 0
            for some in (slice(row, row + _ROWS) for row in range(0, len(rows), _ROWS)):
                ids = [token for one in readings[some] for token in one.ids]
                read = self._its.reads(self._its.spelled(ids), _starts(len(one.ids) for one in readings[some]))
                states_NH = fetch([row.hidden for row in rows[some]], device).wait()
                given = self._its.table, torch.tensor(ids, dtype=torch.long), *read, self._chunk_tokens
                some_PO, escape_P = byte_logarithms(LazyLogits(states_NH, head, self._temperature()), *given)
                logs_PO[at : (at := at + len(some_PO))].copy_(some_PO, non_blocking=True)
                escapes.append(escape_P)
        # This waits for the device, so the distributions have arrived too.
        held_P = torch.cat(escapes).cpu() <= MOST_ESCAPE
        each = zip(readings, logs_PO.split(positions), held_P.split(positions), strict=True)
        targets = [
            ByteTargets(
                hidden=logs[: len(one.token_P)], places=one.token_P, held=held[: len(one.token_P)], reads=one.reads
            )
            for one, logs, held in each
        ]
        return TeacherTargets.by_row(targets, rollout.completion_ids.size(1))

    def _read(self, rows: list[list[int]], needed: list[int], rooms: list[int | None]) -> list[_Reading]:
        """Both models' byte positions in completions, up to the first byte that they do not read alike.

        After the first `needed` tokens there are none, but the teacher's tokens are those of the whole text.
        """
        texts = [self._student.spelled(ids) for ids in rows]
        parts = [[(one, *valid_text(one)) for one in _between(each)] for each in texts]
        known = iter(self._its.ids_of_each([text for each in parts for _, text, _ in each]))
        starts = _starts(map(len, read := [each[:some] for each, some in zip(texts, needed, strict=True)]))
        token_P, reads_R4 = self._student.reads([*chain.from_iterable(read)], starts)
        place_R = reads_R4[:, 0].contiguous()
        ends = torch.searchsorted(token_P, torch.tensor([*starts, sum(map(len, read))])).tolist()
        found = []
        for ids, each, some, room, *at in zip(rows, parts, texts, rooms, starts, ends, ends[1:], strict=False):
            specials = [one for one, text in zip(ids, some, strict=True) if text is None]
            theirs, agreed = self._aligned([(one, valid, next(known)) for one, _, valid in each], specials)
            theirs = theirs if room is None else theirs[: max(room, 0)]
            sums = [0, *accumulate(len(one or b"-") for one in self._its.spelled(theirs))]
            start, place, end = at
            count = min(agreed, end - place, sums[-1])
            tokens = bisect_left(sums, count)
            mine = slice(*torch.searchsorted(place_R, torch.tensor([place, place + count])).tolist())
            reads = reads_R4[mine] - reads_R4.new_tensor([place, start, 0, 0])
            found.append(_Reading(theirs[:tokens], sums[tokens], token_P[place : place + count] - start, reads))
        return found

    def _aligned(self, parts: list[tuple[bytes, int, list[int]]], specials: list[int]) -> tuple[list[int], int]:
        """The teacher's tokens of one completion, and how many byte positions of them are the student's.

        Of the text between its special tokens, `parts` has bytes, how many of them are valid, and the teacher's tokens.
        """
        theirs: list[int] = []
        agreed = 0
        for number, (spelled, valid, more) in enumerate(parts):
            same = _common(b"".join(one or b"\0" for one in self._its.spelled(more)), spelled[:valid])
            theirs, agreed = theirs + more, agreed + same
            if same < len(spelled) or number == len(specials):
                break
            # A special token: both models say whether the text ends here, whatever they call its end.
            agreed += 1
            known = self._its.special_of(self._student.tokenizer.convert_ids_to_tokens(specials[number]))
            theirs.append(0 if known is None else known)  # read by nothing that is compared, if it is unknown
            if known is None:
                break
        return theirs, agreed


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _between(texts: list[bytes | None]) -> Iterator[bytes]:
    """The bytes before, between and after special tokens."""
    start = 0
    for end in [*(at for at, one in enumerate(texts) if one is None), len(texts)]:
        yield b"".join(one or b"" for one in texts[start:end])
        start = end + 1


def _common(one: bytes, other: bytes) -> int:
    """How many bytes are the same at the beginning."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _as_its_own(rollout: Rollout, completions: list[list[int]]) -> Rollout:
    """The same prompts before completions of the teacher's tokens; each of these counts."""
    longest, device = max(1, *map(len, completions)), rollout.completion_ids.device
    ids_BC, mask_BC = torch.zeros(2, len(completions), longest, dtype=torch.long)
    for row, ids in enumerate(completions):
        ids_BC[row, : len(ids)], mask_BC[row, : len(ids)] = torch.tensor(ids, dtype=torch.long), 1
    return replace(
        rollout,
        # Padding has an id of the student's tokenizer.
        prompt_ids=rollout.prompt_ids.masked_fill(rollout.prompt_mask == 0, 0),
        completion_ids=ids_BC.to(device),
        completion_mask=mask_BC.to(device, rollout.completion_mask.dtype),
        weights=mask_BC.to(device, torch.float32),
        pull=None,
        logprobs=None,
        lengths=None,
        on_host=None,
    )
