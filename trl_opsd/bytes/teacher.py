"""A teacher with a tokenizer of its own: reads completions as its own tokens, and answers for each of their bytes.

P byte positions of a row · n tokens of the teacher in it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import gathered_head, whole_head
from trl_opsd.bytes.divergence import Bytewise, byte_logarithms, forks_needed
from trl_opsd.bytes.forks import ForkedRollout, Forking, forked_hidden
from trl_opsd.bytes.table import OUTCOMES, ByteTargets, CoveringTree, Spelled, byte_head
from trl_opsd.bytes.vocabulary import ByteVocabulary
from trl_opsd.losses.objective import Objective
from trl_opsd.models.backbone import completion_hidden, preserved_mode, shape_of
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.models.probes import Probed
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.comparison import Comparison, TeacherTokens, selected, tokens_by_teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.teachers import Teachers, is_ours
from trl_opsd.types import LazyLogits, OutputHead, PerToken, Rollout, Sampled, TeacherTargets
from trl_opsd.types.known import TokenHead
from trl_opsd.types.targets import RowTargets, fetch, has_streams, kept_by_row, targets_device

_ROWS = 8
"""Rows whose states and distributions are on the device at a time."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One completion as both models read it."""

    ids: list[int]
    """The teacher's tokens."""
    tree: CoveringTree
    """Of the teacher's tokens."""
    of_student: CoveringTree
    """Of the student's tokens, up to the last byte that both have."""


@final
class ByteTeacher(Teacher):
    """Turns the targets of another teacher into its distributions over the next byte.

    Args:
        teacher ([`Teacher`]):
            Reads its own tokens.
        student, its ([`~bytes.vocabulary.ByteVocabulary`]):
            What the tokens of the student and of the teacher stand for.
        host ([`OPSDTrainer`]):
            Has the options, temperatures and log.
        student_forks ([`~bytes.forks.Forking`]):
            Whether the student can be read with forks.
    """

    def __init__(
        self, teacher: Teacher, student: ByteVocabulary, its: ByteVocabulary, host: Any, student_forks: Forking
    ) -> None:
        if isinstance(teacher.head, TokenHead):
            raise ValueError(
                f"`cross_tokenizer='bytes'` needs the whole distribution of each teacher, but {teacher} gives only "
                "some tokens: use one with hidden states."
            )
        self._host: Any = host
        self._most_missed: float = host.args.cross_tokenizer_missed
        self._forks, self._student_forks = Forking("teacher", self._most_missed), student_forks
        if self._most_missed < 1 and isinstance(teacher, FrozenTeacher) and is_ours(teacher):
            with teacher.placement.loaded(passes=5) as run:
                probed = Probed(teacher.model, "teacher", run)
                probed.batching = teacher.batching
                probed.prove(self._forks.probe)
        elif self._most_missed < 1:
            self._forks.warn()
        self.teacher, self._student, self.its = teacher, student, its.within(shape_of(teacher.head)[0])
        self._checked = Teachers({type(teacher).__name__: teacher})

    def __str__(self) -> str:
        return f"{self.teacher}, by bytes"

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its own."""
        return self.its.tokenizer

    def told(self, ids: list[int], ends: Collection[int]) -> list[int]:
        """A completion that it ends with one of these, in the student's tokens, as far as these spell it and there is
        room; counts what they do.
        """
        most, ended = self._host.args.max_completion_length, ids[-1:] and ids[-1] in ends
        body = ids[:-1] if ended else ids
        told, kept = self._student.retold(body, self.its)
        size = sum(self.its.sizes(body))
        told = [*told, self._host.eos_token_ids[0]] if ended and kept == size else told
        if len(told) > most:
            told, kept = told[:most], sum(self._student.sizes(told[:most]))
        if size:
            self._host.record("cross/retold", kept / size, 1)
        return told

    @property
    def form(self) -> str:
        """What its tokens and the student's stand for, as a digest."""
        return f"tokens of sha256 {self.its.digest[:16]} by those of {self._student.digest[:16]}"

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
        found, device = self._checked.targets(theirs, ()), rollout.weights.device
        rows = kept_by_row(found, theirs.weights).rows or ()
        if self._forks.works:
            with gathered_head(head := self.teacher.head):
                head, column = head.to(device), theirs.completion_ids.size(1)
                trees = [one for some in _some(rows) for one in self._forked(readings[some], rows[some], head, column)]
            readings = [replace(one, tree=tree) for one, tree in zip(readings, trees, strict=True)]
            # Each process reads again, with forks or without, as that may be collective.
            theirs = _with_forks(theirs, trees)
            assert isinstance(self.teacher, FrozenTeacher), "which alone was tried"
            policy = replace(self.teacher.batching, packed=False)  # masks are of each row's own
            rows = self.teacher.states(theirs, policy, read=forked_hidden).rows or ()
        positions, missed = [len(one.tree.token) for one in readings], list[Tensor]()
        with gathered_head(head := self.teacher.head):
            head, shape = head.to(device), (sum(positions), OUTCOMES)
            kept = targets_device(self._host.args.teacher_cache_device, 4 * shape[0] * shape[1], device)
            logs_PO = torch.empty(shape, device=kept, pin_memory=kept.type == "cpu" and has_streams(device))
            at = 0
            for some in _some(rows):
                logs_pO, missed_p = self._logarithms(readings[some], rows[some], head, theirs.completion_ids.size(1))
                logs_PO[at : (at := at + len(logs_pO))].copy_(logs_pO, non_blocking=True)
                missed.append(missed_p.float())
        # This waits for the device, so the distributions have arrived too.
        each = zip(readings, logs_PO.split(positions), torch.cat(missed).cpu().split(positions), strict=True)
        targets = [
            ByteTargets(hidden=logs[: len(places)], places=places, missed=share[: len(places)], tree=one.of_student)
            for one, logs, share in each
            for places in [torch.from_numpy(one.of_student.token)]
        ]
        return TeacherTargets.by_row(targets, rollout.completion_ids.size(1))

    def compare(
        self, student: CausalLM, rollout: Rollout, targets: TeacherTargets, objective: Objective, policy: BatchPolicy,
        heads: Sequence[OutputHead], origin: OutputHead | None,
    ) -> Comparison:  # fmt: skip
        read: Callable[..., Tensor] = completion_hidden
        if self._student_forks.works:
            read = forked_hidden
            rollout, targets = self._with_forks_of(student, rollout, targets, objective, policy)
        host_BC, rows, columns = rollout.weights_on_host(), _of_bytes(targets), rollout.completion_ids.size(1)
        shares = list[TeacherTokens]()
        for one in tokens_by_teacher(heads, targets, rollout.weights, host_BC=host_BC, by_token=False):
            numbers = range(len(rows)) if targets.teacher is None else (targets.teacher == one.teacher).nonzero()
            each = [(rows[int(row)].tree, rows[int(row)].missed, columns * int(row)) for row in numbers]
            trees, missed, starts = zip(*each, strict=True) if each else ((), (), ())
            spelled = Spelled.of(trees, missed, starts, one.places_N)
            weights_N = one.weights_BC.flatten()[spelled.places]
            given = {field.name: getattr(one, field.name) for field in fields(one)}
            given |= {"places_N": spelled.places, "weights_N": None if bool((weights_N == 1).all()) else weights_N}
            shares.append(_ByteTokens(**given, by=self, spelled=spelled))
        hidden_BCH = read(student, rollout, policy)

        def nats(objective: Objective, row: int, places_n: Tensor, head: OutputHead, teacher: OutputHead) -> Tensor:
            spelled, device = Spelled.of([rows[row].tree], [rows[row].missed], [0], places_n), head.weight.device
            theirs = rows[row].hidden[spelled.kept.to(rows[row].hidden.device)], teacher
            mine = hidden_BCH[row].detach().to(device)[spelled.places.to(device)], head
            sampled = Sampled(rollout.completion_ids[row].cpu()[spelled.places].to(device))
            found_S = self.compared(objective, spelled, mine, theirs, None, sampled).divergence
            # Of states after forks, and of others that are only read for these tokens, nothing is shown.
            which = {place: number for number, place in enumerate(spelled.places.tolist())}
            return found_S[[which[place] for place in places_n.tolist()]]

        return Comparison(rollout, targets, shares, hidden_BCH, nats)

    def compared(
        self, objective: Objective, spelled: Spelled, student: tuple[Tensor, OutputHead],
        logarithms: tuple[Tensor, OutputHead], weights_N: Tensor | None, sampled: Sampled, *_: Any,
    ) -> PerToken:  # fmt: skip
        """The divergence of tokens from targets, which have the teacher's temperature in them."""
        mine, theirs = LazyLogits(*student, objective.temperatures[0]), LazyLogits(*logarithms)
        table, chunk_tokens = self._student.table, objective.chunk_tokens
        given = mine, theirs, objective.divergence, table, spelled, sampled, chunk_tokens, self._most_missed
        return Bytewise(*given).compared(weights_N)

    @torch.no_grad()
    def _with_forks_of(
        self, student: CausalLM, rollout: Rollout, targets: TeacherTargets, objective: Objective, policy: BatchPolicy
    ) -> tuple[Rollout, TeacherTargets]:
        """The rows with the tokens that branch off them, as far as the student's distributions need these."""
        rows, columns = _of_bytes(targets), rollout.completion_ids.size(1)
        with preserved_mode(student):
            student.eval()
            hidden_BCH = completion_hidden(student, rollout, policy)
        trees = [row.tree for row in rows]
        places_S = torch.cat([torch.arange(one.tokens) + row * columns for row, one in enumerate(trees)])
        ids_S = selected(rollout.completion_ids.flatten(), places_S)
        with whole_head(student) as head:
            model = LazyLogits(selected(hidden_BCH.flatten(0, 1), places_S), head, objective.temperatures[0])
            how = self._most_missed, objective.chunk_tokens
            needed = forks_needed(model, self._student.table, ids_S, trees, *how)
        trees = [replace(one, read=read, column=columns) for one, read in zip(trees, needed, strict=True)]
        lengths, rollout = rollout.measured(), ForkedRollout.branching(rollout, [one.branches() for one in trees])
        forked = [replace(row, tree=tree) for row, tree in zip(rows, trees, strict=True)]
        read, added = sum(one.completion for one in lengths), sum(len(tokens) for tokens, _ in rollout.forks)
        self._host.record("cross/forks", added / max(1, read), read)
        return rollout, TeacherTargets.by_row(forked, rollout.completion_ids.size(1), targets.teacher)

    def _forked(
        self, readings: Sequence[_Reading], rows: Sequence[RowTargets], head: OutputHead, column: int
    ) -> list[CoveringTree]:
        """The teacher's trees, with the forks that have to be read."""
        states_NH = fetch([row.hidden for row in rows], head.weight.device).wait()
        model = LazyLogits(states_NH, head, self._host.temperatures[1])
        ids_N = torch.tensor([token for one in readings for token in one.ids], dtype=torch.long)
        trees = [one.tree for one in readings]
        needed = forks_needed(model, self.its.table, ids_N, trees, self._most_missed, self._host.args.loss_chunk_tokens)
        return [replace(tree, read=read, column=column) for tree, read in zip(trees, needed, strict=True)]

    def _logarithms(
        self, readings: Sequence[_Reading], rows: Sequence[RowTargets], head: OutputHead, columns: int
    ) -> tuple[Tensor, Tensor]:
        """Distributions over the next byte, [P, 257], and what is missed of them, of a few rows of so many columns."""
        trees, starts = [one.tree for one in readings], [columns * row for row in range(len(readings))]
        places_N = torch.cat([torch.arange(one.tokens) + start for one, start in zip(trees, starts, strict=True)])
        spelled = Spelled.of(trees, None, starts, places_N)
        ids_M = torch.zeros(columns * len(trees), dtype=torch.long)
        ids_M[places_N] = torch.tensor([token for one in readings for token in one.ids], dtype=torch.long)
        states_NH = fetch([row.hidden for row in rows], head.weight.device).wait()
        at_N = torch.cat([row.places + start for row, start in zip(rows, starts, strict=True)])
        states_SH = selected(states_NH, torch.searchsorted(at_N, spelled.places))
        model = LazyLogits(states_SH, head, self._host.temperatures[1])
        return byte_logarithms(model, self.its.table, ids_M[spelled.places], spelled, self._host.args.loss_chunk_tokens)

    def _read(self, rows: list[list[int]], needed: list[int], rooms: list[int | None]) -> list[_Reading]:
        """Both models' byte positions in completions, up to the first byte that they do not read alike.

        After the first `needed` tokens there are none, but the teacher's tokens are those of the whole text.
        """
        mine = self._student.trees([ids[:some] for ids, some in zip(rows, needed, strict=True)])
        each = self.its.retokenized(rows, self._student)
        found = []
        for (theirs, agreed, lacks), room, tree in zip(each, rooms, mine, strict=True):
            if lacks:
                # Both models say whether the text ends here, whatever they call its end; nothing compared reads the id.
                theirs, agreed = [*theirs, 0], agreed + 1
            theirs = theirs if room is None else theirs[: max(room, 0)]
            sums = [*accumulate(self.its.sizes(theirs), initial=0)]
            count = min(agreed, len(tree.token), sums[-1])
            found.append((theirs[: bisect_left(sums, count)], tree.cut(count)))
        trees = self.its.trees([theirs for theirs, _ in found])
        return [_Reading(theirs, tree, cut) for (theirs, cut), tree in zip(found, trees, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteTokens(TeacherTokens):
    """Tokens with a target for each of their bytes; those of weight 0 that are read for others are among them."""

    by_token: ClassVar[bool] = False
    by: ByteTeacher
    spelled: Spelled

    def compared(self, objective: Objective, *given: Any) -> PerToken:
        return self.by.compared(objective, self.spelled, *given)


def _of_bytes(targets: TeacherTargets) -> list[ByteTargets]:
    rows = [row for row in targets.rows or () if isinstance(row, ByteTargets)]
    assert len(rows) == len(targets.rows or ()), "all teachers are compared by bytes, or none is"
    return rows


def _some(rows: Sequence[RowTargets]) -> Iterator[slice]:
    return (slice(row, row + _ROWS) for row in range(0, len(rows), _ROWS))


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
        completion_ids=ids_BC.to(device, non_blocking=True),
        completion_mask=mask_BC.to(device, rollout.completion_mask.dtype, non_blocking=True),
        weights=mask_BC.to(device, torch.float32, non_blocking=True),
        nll_weight=None,
        logprobs=None,
        lengths=None,
        on_host=None,
    )


def _with_forks(rollout: Rollout, trees: list[CoveringTree]) -> ForkedRollout:
    """The same rows, with the forks that are read; the state after each counts."""
    column = rollout.completion_ids.size(1)
    forked = ForkedRollout.branching(rollout, [one.branches() for one in trees])
    weights_BC = forked.weights.clone()
    for row, tree in enumerate(trees):
        weights_BC[row, column : column + int(tree.read.sum())] = 1
    return replace(forked, weights=weights_BC)
