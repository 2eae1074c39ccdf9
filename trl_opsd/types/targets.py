"""The teacher's hidden states for the tokens of a rollout: how they are kept, and prefetched to the device.

B rows · C completion tokens · N loss tokens · n tokens of one row that may count · H hidden size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trl_opsd.types.rollout import Rollout


@dataclass(frozen=True, slots=True)
class RowTargets:
    """The targets of the tokens of one row that may count, and of no other token."""

    hidden: Tensor
    """[n, H_t], in the width and dtype of the row's teacher, on the device that keeps targets."""
    places: Tensor
    """[n], int64, in host memory: positions of these tokens in the completion, ascending."""

    def cut(self, tokens: int) -> RowTargets:
        """Those of the first completion tokens."""
        kept = int(torch.searchsorted(self.places, tokens))
        return self if kept == len(self.places) else RowTargets(self.hidden[:kept], self.places[:kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTargets:
    """The teacher's targets for a rollout, small enough to keep for a whole generation batch.

    `TeacherTargets(hidden=...)` has a state for each token. Teachers of this package keep only those of tokens that may
    count, in `rows`; `hidden` is then a copy, made on first access, which from then on replaces `rows`.
    """

    hidden: Tensor = field(repr=False)  # a repr would create it
    """[B, C, H_t], the teacher's last hidden state at the position that *predicts* each completion token.

    Made from `rows`, it is 0 at tokens that cannot count, and as wide as the widest teacher of the batch, padded with
    zeros."""
    teacher: Tensor | None = None
    """[B], in host memory, the number of the teacher that scored the row; `None` where there is only one."""
    rows: tuple[RowTargets, ...] | None = field(default=None, init=False, repr=False)
    """The targets row by row, or `None` where `hidden` holds them."""
    reference_states: Mapping[str, tuple[RowTargets, ...]] = field(default_factory=dict, init=False, repr=False)
    """States of the same tokens in other contexts or of another model, row by row: `"contrast"`, `"origin"`."""
    tokens: int = field(default=0, init=False, repr=False)
    """C, where `rows` hold the targets."""

    def cut(self, tokens: int) -> TeacherTargets:
        """The targets of the first completion tokens, for a batch in which no later token counts."""
        reference_states = {
            name: tuple(row.cut(tokens) for row in rows) for name, rows in self.reference_states.items()
        }
        if self.rows is None:
            return replace(self, hidden=self.hidden[:, :tokens]).with_references(reference_states)
        return TeacherTargets.by_row([row.cut(tokens) for row in self.rows], tokens, self.teacher, reference_states)

    @classmethod
    def by_row(
        cls,
        rows: Iterable[RowTargets],
        tokens: int,
        teacher: Tensor | None = None,
        reference_states: Mapping[str, tuple[RowTargets, ...]] = MappingProxyType({}),
    ) -> TeacherTargets:
        """Targets of B rows of C = `tokens` completion tokens."""
        # Without `__init__` the slot `hidden` stays empty, so that `__getattr__` fills it on first access.
        self = object.__new__(cls)
        values = {"rows": tuple(rows), "tokens": tokens, "teacher": teacher, "reference_states": reference_states}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    def with_references(self, reference_states: Mapping[str, tuple[RowTargets, ...]]) -> TeacherTargets:
        """These targets, with states beside the teacher's."""
        object.__setattr__(self, "reference_states", reference_states)
        return self

    def __getattr__(self, name: str) -> Tensor:
        # Reached only while the slot is empty. The caller may write to the states, so they replace the rows.
        if name != "hidden":
            raise AttributeError(f"`TeacherTargets` has no attribute `{name}`.")
        assert self.rows, "a rollout has rows"
        if type(self.rows[0]) is not RowTargets:
            raise ValueError(f"`{type(self.rows[0]).__name__}` have no state for each token: use `rows`.")
        wide = max((row.hidden for row in self.rows), key=lambda states: states.size(1))
        dtype = reduce(torch.promote_types, (row.hidden.dtype for row in self.rows))
        hidden_BCH = wide.new_zeros(len(self.rows), self.tokens, wide.size(1), dtype=dtype)
        for to_CH, row in zip(hidden_BCH, self.rows, strict=True):
            to_CH[row.places.to(to_CH.device), : row.hidden.size(1)] = row.hidden.to(to_CH)
        object.__setattr__(self, "hidden", hidden_BCH)
        object.__setattr__(self, "rows", None)
        return hidden_BCH

    def of(self, row: int, places_n: Tensor) -> Tensor:
        """[n, H_t]: the states at these positions of a row, which are ascending, in host memory, and may count."""
        if self.rows is None:
            return self.hidden[row].index_select(0, places_n.to(self.hidden.device))
        # Kept places are ascending, so a binary search finds the indices.
        kept = self.rows[row]
        at_n = torch.searchsorted(kept.places, places_n)
        return kept.hidden.index_select(0, at_n.to(kept.hidden.device, non_blocking=True))

    def reference_states_of(self, row: int, places_n: Tensor) -> dict[str, Tensor]:
        """[n, H_t] each: the states beside, at these positions of a row, as of [`~TeacherTargets.of`]."""
        each = {name: TeacherTargets.by_row(rows, self.tokens) for name, rows in self.reference_states.items()}
        return {name: one.of(row, places_n) for name, one in each.items()}

    def among(self, numbers: Sequence[int], rows: int) -> TeacherTargets:
        """The targets of a batch that has these rows at some of its places, and no token that may count elsewhere."""

        def spread(kept: Sequence[RowTargets]) -> tuple[RowTargets, ...]:
            known = dict(zip(numbers, kept, strict=True))
            return tuple(known.get(row) or kept[0].cut(0) for row in range(rows))

        assert self.rows is not None, "kept by row"
        teacher, reference_states = self.teacher, {name: spread(one) for name, one in self.reference_states.items()}
        if teacher is not None:
            teacher = teacher[:1].repeat(rows).index_copy(0, torch.tensor(numbers), teacher)
        return TeacherTargets.by_row(spread(self.rows), self.tokens, teacher, reference_states)

    def select(self, numbers: Sequence[int]) -> TeacherTargets:
        """The targets of the given rows, in the given order, of targets kept by row."""
        assert self.rows is not None, "only `rows` do not depend on the longest completion of a batch"
        reference_states = {
            name: tuple(rows[number] for number in numbers) for name, rows in self.reference_states.items()
        }
        teacher = None if self.teacher is None else self.teacher[torch.tensor(numbers, dtype=torch.long)]
        return TeacherTargets.by_row([self.rows[number] for number in numbers], self.tokens, teacher, reference_states)


CACHE_BYTES = 1_000_000_000
"""Maximum bytes of the targets of a generation batch that `"auto"` keeps on the accelerator."""
_WITHOUT_STREAMS = ("cpu", "mps")
"""Devices that copy synchronously, without pinned memory."""


def has_streams(device: torch.device) -> bool:
    """Whether copies to a device can overlap with computation, for which host memory has to be pinned."""
    return device.type not in _WITHOUT_STREAMS


def targets_device(choice: str, nbytes: int, accelerator: torch.device) -> torch.device:
    """The device that buffers targets of `nbytes`; `choice` is `OPSDConfig.teacher_cache_device`."""
    on_accelerator = choice == "accelerator" or (choice == "auto" and nbytes <= CACHE_BYTES)
    return accelerator if on_accelerator else torch.device("cpu")


class Keeper:
    """Collects the states of a rollout's loss tokens, those with a weight; each row is put once, in any order.

    States that come from host memory are collected there, pinned, and sent to the device that keeps them at once.
    """

    def __init__(self, weights_BC: Tensor, choice: str) -> None:
        self._accelerator = weights_BC.device
        self._choice = choice
        self._tokens = weights_BC.size(1)
        # Which tokens these are is needed on the host: this waits for the device.
        self._places = [counts_C.nonzero().squeeze(1) for counts_C in weights_BC.cpu() != 0]
        self._order: list[int] = []
        self._block: Tensor | None = None
        self._device = self._source = weights_BC.device
        self._filled = 0

    @torch.no_grad()
    def put(self, rows: Sequence[int], hidden_nCH: Tensor) -> None:
        """Buffers states of rows, by their numbers; columns after the last loss token may be missing."""
        device = hidden_nCH.device
        # Lengths and places are on the host, so that nothing here waits for the device.
        lengths_n = torch.tensor([len(self._places[row]) for row in rows])
        at_N = torch.arange(len(rows)).repeat_interleave(lengths_n).to(device, non_blocking=True)
        places_N = torch.cat([self._places[row] for row in rows]).to(device, non_blocking=True)
        states_NH = self._room(rows, hidden_nCH)
        if len(rows) == 1 and device == states_NH.device:
            torch.index_select(hidden_nCH[0], 0, places_N, out=states_NH)  # indexing would copy twice
        else:
            states_NH.copy_(hidden_nCH[at_N, places_N], non_blocking=True)

    def put_tokens(self, row: int, states_NH: Tensor) -> None:
        """Buffers states of the loss tokens of a row alone."""
        self._room([row], states_NH).copy_(states_NH, non_blocking=True)

    def targets(self, teacher: Tensor | None = None) -> TeacherTargets:
        """All states, when they have arrived; `teacher` as in [`~types.TeacherTargets`]."""
        assert self._block is not None, "a generation batch has rows"
        if self._block.is_pinned() and has_streams(self._source):
            torch.accelerator.current_stream(self._source).synchronize()
        block = self._block.to(self._device, non_blocking=True)
        each = block.split([len(self._places[row]) for row in self._order])
        kept = {row: RowTargets(of_row, self._places[row]) for row, of_row in zip(self._order, each, strict=True)}
        return TeacherTargets.by_row([kept[row] for row in range(len(self._places))], self._tokens, teacher)

    def _room(self, rows: Sequence[int], like: Tensor) -> Tensor:
        """[N, H], where the states of these rows belong, of a width and dtype and on a device like this."""
        if self._block is None:
            shape = (sum(map(len, self._places)), like.size(-1))
            nbytes = shape[0] * shape[1] * like.element_size()
            self._device = targets_device(self._choice, nbytes, self._accelerator)
            device = like.device if like.device.type == "cpu" else self._device
            # One block: torch rounds each pinned allocation up to a power of two.
            pinned = device.type == "cpu" and has_streams(self._accelerator)
            self._block = torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)
        self._source, start = like.device, self._filled
        self._filled += sum(len(self._places[row]) for row in rows)
        self._order += rows
        return self._block[start : self._filled]


def kept_by_row(targets: TeacherTargets, weights_BC: Tensor) -> TeacherTargets:
    """The same targets, by row and for loss tokens only; those of a user's teacher have a state for each token."""
    if targets.rows is not None:
        return targets
    keeper = Keeper(weights_BC, "cpu" if targets.hidden.device.type == "cpu" else "accelerator")
    keeper.put(range(len(weights_BC)), targets.hidden)
    return keeper.targets(targets.teacher).with_references(targets.reference_states)


@dataclass(frozen=True, slots=True)
class Arriving:
    """States that are being copied to a device."""

    states: Tensor
    stream: torch.Stream | None
    """The stream that copies them; `None` if they have arrived."""

    def wait(self) -> Tensor:
        """The states; makes later work on the device wait for them, but not the host."""
        if self.stream is not None:
            torch.accelerator.current_stream(self.states.device).wait_stream(self.stream)
        return self.states


def fetch(rows: Sequence[Tensor], device: torch.device) -> Arriving:
    """Starts to copy states to a device, [n, H] each, concatenated; from pinned memory concurrently with computation.

    Call it before the student's forward, which takes several times as long as the copy of its targets.
    """
    if not (has_streams(device) and rows[0].is_pinned()):
        return Arriving(torch.cat(list(rows)).to(device, non_blocking=True), None)
    stream = _copies(device)
    arriving = rows[0].new_empty(sum(map(len, rows)), rows[0].size(1), device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))  # which may still use what was in this memory
    with stream:
        for place, row in zip(arriving.split([len(row) for row in rows]), rows, strict=True):
            place.copy_(row, non_blocking=True)
    arriving.record_stream(stream)  # in case nobody waits for it
    return Arriving(arriving, stream)


@cache
def _copies(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def check_targets(targets: Any, rollout: Rollout, where: str, width: int | None = None) -> None:
    """Raises `ValueError` unless targets fit the tokens of a rollout, and are `width` wide where it is known."""
    rows, tokens = rollout.completion_ids.shape
    got = type(targets).__name__
    if isinstance(targets, TeacherTargets):
        if (by_row := targets.rows) is None:
            hidden, shape = targets.hidden, list(getattr(targets.hidden, "shape", []))
        else:
            hidden = max((row.hidden for row in by_row), key=lambda states: states.size(1))
            shape = [len(by_row), targets.tokens, hidden.size(1)]
        fits = len(shape) == 3 and shape[:2] == [rows, tokens] and width in (None, shape[2])
        if fits and hidden.is_floating_point():
            return
        got = f"`TeacherTargets` of shape {shape} in {getattr(hidden, 'dtype', type(hidden).__name__)}"
    raise ValueError(
        f"`{where}` returned {got}: expected `TeacherTargets(hidden=...)` of shape [{rows}, {tokens}, {width or 'H'}] "
        "of floats: for each completion token the state that predicts it, with the width of the teacher's head."
    )
