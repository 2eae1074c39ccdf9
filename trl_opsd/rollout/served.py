"""Takes rows from an engine outside of this process as they end, while the student may already be trained on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import ClassVar, TypeVar
from weakref import WeakSet

import torch

from trl_opsd.config import OPSDConfig
from trl_opsd.host import Host
from trl_opsd.rollout.engine import RowEngine, Rows
from trl_opsd.rollout.synced import SyncedRollout
from trl_opsd.run.pulled import Endable
from trl_opsd.run.rng import derived_seed
from trl_opsd.types import Completion

R = TypeVar("R", bound=RowEngine)


class ServedRollout(SyncedRollout[R]):
    """A rollout with an engine that has a device of its own, which does not sleep and takes whole weights.

    Args:
        args ([`OPSDConfig`]):
            The options.
    """

    writes_apart: ClassVar[bool] = True

    def __init__(self, args: OPSDConfig) -> None:
        super().__init__(args)
        self._streams: WeakSet[Rows] = WeakSet()
        self._uses: Counter[int] = Counter()
        self._seeded: Host | None = None
        self._loads = 0

    def stream(self, prompt_ids: list[list[int]], step: int) -> Iterator[tuple[int, list[int]]]:
        rows = self.stream_completions(prompt_ids, step)
        return Endable(((number, row.completion_ids) for number, row in rows), rows.close)

    def stream_completions(
        self, prompt_ids: list[list[int]], step: int, logprobs: bool = False
    ) -> Endable[tuple[int, Completion]]:
        """As `stream`, with all that the engine answers.

        Each row has a seed of its own, from `seed`, `step`, its number among the rows of all processes, and how often
        rows were written at this step before, unless `generation_kwargs` has one.

        Args:
            prompt_ids, step:
                As for `complete`.
            logprobs (`bool`, *optional*, defaults to `False`):
                Whether each completion has its `logprobs`, by the weights that it was written with.

        Returns:
            [`~run.pulled.Endable`]: the number of each prompt and its completion, in the order they end. It raises
            `RuntimeError` if weights were sent to the engine before the last row was taken.
        """
        with self.session():
            options = self._begun(prompt_ids)
            seeds = self._seeds(step, len(prompt_ids))
            asked = {"logprobs": 0} if logprobs else {}
            written = self._engine.write_each(
                prompt_ids, [{"seed": seed, **own, **asked} for seed, own in zip(seeds, options, strict=True)]
            )
        self._streams.add(written)
        return Endable(self._rows(written, prompt_ids), written.close)

    def _rows(self, written: Rows, prompt_ids: list[list[int]]) -> Generator[tuple[int, Completion], None, None]:
        missing = len(prompt_ids)
        with closing(written):
            for number, row in written:
                self._check_prompt(number, prompt_ids[number], row)
                missing -= 1
                yield number, row
        if missing:
            raise RuntimeError(
                f"{missing} of {len(prompt_ids)} rows were given up, because {self._engine.name} was sent weights or "
                "closed while it wrote them: take all rows of a stream first."
            )

    def sync_weights(self) -> None:
        """As for every engine. Rows of a stream that have not ended are given up, so that none is written with two
        states of the weights; one that an exception left behind is in nobody's way.
        """
        self._give_up()
        self._trainer.accelerator.wait_for_everyone()
        super().sync_weights()

    def close(self) -> None:
        self._give_up()
        super().close()

    def _give_up(self) -> None:
        for written in list(self._streams):
            written.close()

    def _seeds(self, step: int, rows: int) -> list[int]:
        """A seed for each row. Collective."""
        trainer = self._trainer
        if self._seeded is not trainer:
            self._seeded, self._uses = trainer, Counter()
        elif trainer.loads != self._loads and step:  # resumed: what was written from this step on is written again
            self._uses = Counter({before: uses for before, uses in self._uses.items() if before < step})
        self._loads = trainer.loads
        use = self._uses[step]
        self._uses[step] += 1
        accelerator = trainer.accelerator
        counts = accelerator.gather(torch.tensor([rows], device=accelerator.device)).tolist()
        first = sum(counts[: accelerator.process_index])
        return [derived_seed(self._args.seed, step, use, first + row) for row in range(rows)]

    def _wake(self, what: str) -> None:
        """A server does not sleep."""

    def _rest(self) -> None:
        """A server does not sleep."""
