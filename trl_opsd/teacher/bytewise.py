"""A teacher with a tokenizer of its own: reads completions as its own tokens, and answers for each of their bytes.

P byte positions of a row · n tokens of the teacher in it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from trl_opsd.data.byte_vocabulary import ByteVocabulary, valid_text
from trl_opsd.losses.bytewise import MOST_ESCAPE, byte_logarithms
from trl_opsd.models.backbone import gathered_head, shape_of
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.teachers import check_depends_on_input, prove_alignment, scored
from trl_opsd.types import LazyLogits, OutputHead, Rollout, TeacherTargets
from trl_opsd.types.bytewise import ByteTargets, byte_head
from trl_opsd.types.targets import kept_by_row, targets_device


@dataclass(frozen=True, slots=True)
class _Reading:
    """One completion as both models read it."""

    ids: list[int]
    """The teacher's tokens."""
    token_P: Tensor
    """The number of the student's token of each byte position that both have."""
    reads: Tensor
    """Of the student, as [`~types.bytewise.ByteTargets.reads`]."""
    its_token_P: Tensor
    its_reads: Tensor


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
        needed = map(len, ended.completion_lists())
        each_row = zip(rollout.completion_lists(), needed, rooms, strict=True)
        readings = [self._read(ids, some, room) for ids, some, room in each_row]
        theirs = _as_its_own(rollout, [one.ids for one in readings])
        found = scored(self.teacher, theirs)
        check_depends_on_input(theirs, found, type(self.teacher).__name__)
        if self._is_unproved:
            name = f"{type(self.teacher).__name__}.targets"
            prove_alignment(partial(scored, self.teacher), theirs, found, name)
            self._is_unproved = False
        rows = kept_by_row(found, theirs.weights).rows or ()
        # Of all rows at once: what is read for a byte stays within its row.
        tokens, positions = (
            [len(one) for one in each] for each in zip(*((one.ids, one.its_token_P) for one in readings), strict=True)
        )
        moved = [torch.tensor([at, start, 0, 0]) for at, start in zip(_starts(positions), _starts(tokens), strict=True)]
        token_P = torch.cat([one.its_token_P + move[1] for one, move in zip(readings, moved, strict=True)])
        reads = torch.cat([one.its_reads.long() + move for one, move in zip(readings, moved, strict=True)])
        with gathered_head(head := self.teacher.head):
            device = head.weight.device
            model = LazyLogits(torch.cat([row.hidden for row in rows]).to(device), head, self._temperature())
            ids = torch.tensor([token for one in readings for token in one.ids], dtype=torch.long, device=device)
            logs_PO, escape_P = byte_logarithms(model, self._its.table, ids, token_P, reads, self._chunk_tokens)
        logs_PO = logs_PO.to(targets_device(self._cache_device, logs_PO.nbytes, logs_PO.device))
        each = zip(readings, logs_PO.split(positions), (escape_P.cpu() <= MOST_ESCAPE).split(positions), strict=True)
        targets = [
            ByteTargets(
                hidden=logs[: len(one.token_P)], places=one.token_P, held=held[: len(one.token_P)], reads=one.reads
            )
            for one, logs, held in each
        ]
        return TeacherTargets.by_row(targets, rollout.completion_ids.size(1))

    def _read(self, ids: list[int], needed: int, room: int | None) -> _Reading:
        """Both models' byte positions in a completion, up to the first byte that they do not read alike.

        After the first `needed` tokens there are none, but the teacher's tokens are those of the whole text.
        """
        texts = self._student.spelled(ids)
        theirs: list[int] = []
        agreed, number = 0, 0  # byte positions so far, and the token that follows
        while number < len(texts):
            end = next((at for at in range(number, len(texts)) if texts[at] is None), len(texts))
            spelled = b"".join(one or b"" for one in texts[number:end])
            text, valid = valid_text(spelled)
            more = self._its.ids_of(text) if text else []
            same = _common(b"".join(one or b"\0" for one in self._its.spelled(more)), spelled[:valid])
            theirs, agreed = theirs + more, agreed + same
            if same < len(spelled) or end == len(texts):
                break
            # A special token: both models say whether the text ends here, whatever they call its end.
            agreed, number = agreed + 1, end + 1
            known = self._its.special_of(self._student.tokenizer.convert_ids_to_tokens(ids[end]))
            theirs.append(0 if known is None else known)  # read by nothing that is compared, if it is unknown
            if known is None:
                break
        if room is not None:
            theirs = theirs[: max(room, 0)]
        token_P, reads = self._student.reads(texts[:needed])
        its_token_P, its_reads = self._its.reads(self._its.spelled(theirs))
        count = min(agreed, len(token_P), len(its_token_P))
        theirs = theirs[: int(its_token_P[count - 1]) + 1 if count else 0]
        its_token_P, its_reads = self._its.reads(self._its.spelled(theirs))
        return _Reading(theirs, token_P[:count], reads[reads[:, 0] < count], its_token_P, its_reads)


def _starts(sizes: list[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _common(one: bytes, other: bytes) -> int:
    """How many bytes are the same at the beginning."""
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
