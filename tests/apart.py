"""A rollout that replays recorded completions as an engine apart from the trainer would: in any order, one at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from trl_opsd import FixedRollout


class Apart(FixedRollout):
    """Yields each recorded completion when it would have ended.

    Args:
        completions (`Mapping`):
            As for [`FixedRollout`].
        order (`int`, *optional*, defaults to 0):
            Seed of the order in which rows end.
        seconds (`Callable`, *optional*):
            How long to wait for a row after the one before it, by its completion.
    """

    writes_apart = True

    def __init__(
        self,
        completions: Mapping[tuple[int, ...], Sequence[int]],
        order: int = 0,
        seconds: Callable[[list[int]], float] = lambda _: 0.0,
    ) -> None:
        super().__init__(completions)
        self._order, self._seconds = order, seconds
        self.events: list[Any] = []
        """What happened: `("row", number)`, "ended" and "closed", and what tests add."""

    def stream(self, prompt_ids: list[list[int]], step: int) -> Generator[tuple[int, list[int]], None, None]:
        written = self.complete(prompt_ids, step)
        order = random.Random(self._order + step).sample(range(len(written)), len(written))
        try:
            for row in order:
                time.sleep(self._seconds(written[row]))
                self.events.append(("row", row))
                yield row, written[row]
            self.events.append("ended")
        finally:
            self.events.append("closed")
