"""Buffers teacher states of loss tokens in one block of memory, and prefetches them to the device.

B rows · C completion tokens · N loss tokens · n tokens of one row · H hidden width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from trl_opsd.types import RowTargets, TeacherTargets

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
    """Collects the states of a rollout's loss tokens, those with a weight; each row is put once, in any order."""

    def __init__(self, weights_BC: Tensor, choice: str) -> None:
        self._accelerator = weights_BC.device
        self._choice = choice
        self._tokens = weights_BC.size(1)
        # Which tokens these are is needed on the host: this waits for the device.
        self._places = [counts_C.nonzero().squeeze(1) for counts_C in weights_BC.cpu() != 0]
        self._rows: dict[int, RowTargets] = {}
        self._block: Tensor | None = None
        self._source = weights_BC.device
        self._filled = 0

    @torch.no_grad()
    def put(self, rows: Sequence[int], hidden_nCH: Tensor) -> None:
        """Buffers states of rows, by their numbers; columns after the last loss token may be missing."""
        if self._block is None:
            self._block = self._allocate(hidden_nCH)
        self._source = device = hidden_nCH.device
        # Lengths and places are on the host, so that nothing here waits for the device.
        lengths = [len(self._places[row]) for row in rows]
        at_N = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device, non_blocking=True)
        places_N = torch.cat([self._places[row] for row in rows]).to(device, non_blocking=True)
        states_NH = self._block[self._filled : self._filled + len(places_N)]
        if len(rows) == 1 and device == states_NH.device:
            torch.index_select(hidden_nCH[0], 0, places_N, out=states_NH)  # indexing would copy twice
        else:
            states_NH.copy_(hidden_nCH[at_N, places_N], non_blocking=True)
        self._filled += len(places_N)
        for row, of_row in zip(rows, states_NH.split(lengths), strict=True):
            self._rows[row] = RowTargets(of_row, self._places[row])

    def targets(self, teacher: Tensor | None = None) -> TeacherTargets:
        """All states, when they have arrived; `teacher` as in [`~types.TeacherTargets`]."""
        assert self._block is not None, "a generation batch has rows"
        if self._block.is_pinned() and has_streams(self._source):
            torch.accelerator.current_stream(self._source).synchronize()
        return TeacherTargets.by_row([self._rows[row] for row in range(len(self._places))], self._tokens, teacher)

    def _allocate(self, like: Tensor) -> Tensor:
        shape = (sum(map(len, self._places)), like.size(-1))
        device = targets_device(self._choice, shape[0] * shape[1] * like.element_size(), self._accelerator)
        # One block: torch rounds each pinned allocation up to a power of two.
        pinned = device.type == "cpu" and has_streams(self._accelerator)
        return torch.empty(shape, dtype=like.dtype, device=device, pin_memory=pinned)


def kept_by_row(targets: TeacherTargets, weights_BC: Tensor) -> TeacherTargets:
    """The same targets, by row and for loss tokens only; those of a user's teacher have a state for each token."""
    if targets.rows is not None:
        return targets
    keeper = Keeper(weights_BC, "cpu" if targets.hidden.device.type == "cpu" else "accelerator")
    keeper.put(range(len(weights_BC)), targets.hidden)
    return keeper.targets(targets.teacher)


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
