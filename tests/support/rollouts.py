"""Rollouts whose completions follow from prompts alone, and as an engine would write them: one by one, in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from support import tiny

from trl_opsd import FixedRollout


class Apart(FixedRollout):
    """Yields each recorded completion when it would have ended; `order` is the seed of the order in which they do.

    `before` is called before a row ends, with the number of those that have ended.
    """

    generates_out_of_process = True

    def __init__(
        self,
        completions: Mapping[tuple[int, ...], Sequence[int]],
        order: int = 0,
        before: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(completions)
        self.order, self._before = order, before
        self.events: list[Any] = []
        """What happened: `("row", number)`, "ended" and "closed", and what tests add."""

    def stream(self, prompt_ids: list[list[int]], step: int) -> Generator[tuple[int, list[int]], None, None]:
        written = self.complete(prompt_ids, step)
        order = random.Random(self.order + step).sample(range(len(written)), len(written))
        try:
            for number, row in enumerate(order):
                self._before(number)
                self.events.append(("row", row))
                yield row, written[row]
            self.events.append("ended")
        finally:
            self.events.append("closed")


class Answering(Apart):
    """Completes each prompt with what a function makes of its token ids."""

    def __init__(self, answer: Callable[[list[int]], list[int]], apart: bool = False) -> None:
        super().__init__({})
        self._answer, self.generates_out_of_process = answer, apart

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        return [self._answer(ids) for ids in prompt_ids]


class Numbered(FixedRollout):
    """Writes what a function makes of a prompt's text and of how often the batch had that prompt before."""

    def __init__(self, write: Callable[[str, int], str]) -> None:
        super().__init__({})
        self._write = write

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        words, count = tiny.tokenizer(), Counter[str]()
        texts = []
        for prompt in words.batch_decode(prompt_ids):
            texts.append(f"{self._write(prompt, count[prompt])}<|im_end|>")
            count[prompt] += 1
        return words(texts)["input_ids"]
