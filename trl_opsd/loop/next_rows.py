"""Reads the rows of the next step while this one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer


class NextRows:
    """The rows of the next step. `lost` is called where rows that were read never come: an epoch ended early."""

    def __init__(self, host: OPSDTrainer, lost: Callable[[], None]) -> None:
        self._host, self._lost = host, lost
        self._next_batch: tuple[Iterator[Any], Any] | None = None
        """The epoch iterator, and the batch of the next step that it returned."""

    def batch(self, fetch: Callable[..., Any], epoch_iterator: Iterator[Any], number: int, device: torch.device) -> Any:
        """The `number` micro-steps of a step that `fetch` takes from an iterator; also takes those of the next step."""
        known, self._next_batch = self._next_batch, None
        if known is not None and known[0] is epoch_iterator:
            found = known[1]
            if isinstance(found, Exception):
                raise found
        else:
            self._lost()
            found = fetch(epoch_iterator, number, device)
        if self._host.state.global_step + 1 < self._host.state.max_steps:  # the last step has no next one
            calls = self._host.args.gradient_accumulation_steps
            try:
                following = fetch(epoch_iterator, calls, device)
            except Exception as error:  # of its own step, after this one is saved
                following = error
            self._next_batch = epoch_iterator, following
        return found

    @property
    def rows(self) -> list[Any]:
        """The rows of this process; none after the last step of an epoch."""
        known = None if self._next_batch is None else self._next_batch[1]
        micro_steps = [] if known is None or isinstance(known, Exception) else known[0]
        return micro_steps[0] if micro_steps else []

    def forget(self) -> None:
        """Drops them at the end of a training."""
        self._next_batch = None
