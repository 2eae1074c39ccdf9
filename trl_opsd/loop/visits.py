"""The last visit of each prompt, by which it is skipped or weighted before anything is generated for it.

R rows of a generation batch, over all processes · K of them that are generated
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, final

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_opsd.data.datasets import comparable
from trl_opsd.data.outcomes import Visit, is_skipped
from trl_opsd.loop.rows import BatchRow
from trl_opsd.loop.trainer_host import TrainerHost
from trl_opsd.options.table import LARGEST_WEIGHT

__all__ = ["Visits"]

FILE = "opsd_visits.json"
"""File of a checkpoint with the last visit of each prompt."""


@final
class Visits:
    """Last visits of the prompts of a training, the same in all processes; a resumed training goes on with them.

    A prompt is known by the columns of its row: rows that are alike are one prompt.
    """

    def __init__(self, trainer: TrainerHost, weight_fn: Callable[..., Any] | None) -> None:
        self._trainer, self._weight_fn = trainer, weight_fn
        self.begin()

    def begin(self) -> None:
        """Begins with no visit, for a new training; before a checkpoint is loaded."""
        self._last: dict[str, Visit] = {}
        self.tokens_saved = 0
        """Tokens that the completions of skipped prompts had at their last visits, since the run began."""
        self.rewards: Sequence[float | None] = ()
        """Of this step, R of them; empty where there are none."""
        self._prompts: list[tuple[str, float]] = []
        self._tokens: list[int] = []

    # ---- A step -----------------------------------------------------------------------------------------------------

    def weigh(self, rows: Sequence[BatchRow]) -> None:
        """Sets the weight of the prompt of each row of a generation batch; 0 if it is skipped. Collective."""
        # The rows of a prompt are adjacent, and may be in several processes: the one with the first of them decides.
        first, number = self._trainer.accelerator.process_index * len(rows), self._trainer.args.num_generations
        firsts = [row for place, row in enumerate(rows, first) if place % number == 0]
        self.rewards, self._prompts = (), gather_object([(key := _key(row), self._weight(row, key)) for row in firsts])
        for place, row in enumerate(rows, first):
            row.prompt_weight = self._prompts[place // number][1]
        skipped, saved = [key for key, weight in self._prompts if not weight], 0
        for key in skipped:
            if (last := self._last.get(key)) is not None:
                saved += last.tokens
                self._last[key] = replace(last, skipped=last.skipped + 1)
        self.tokens_saved += saved
        self._trainer.record("prompts/skipped", len(skipped) / len(self._prompts))
        self._trainer.record("prompts/tokens_saved", saved)

    def _weight(self, row: BatchRow, key: str) -> float:
        last, kind = self._last.get(key), self._trainer.args.skip_prompts
        if self._weight_fn is None:
            return float(kind is None or not is_skipped(kind, last))
        try:
            weight = self._weight_fn(dict(row), last)
        except Exception as error:
            error.add_note(f"`prompt_weight_fn` raised this for {row.request.where}.")
            raise
        if not (isinstance(weight, Real) and 0 <= float(weight) <= LARGEST_WEIGHT):
            raise ValueError(
                f"`prompt_weight_fn` returned {weight!r} for {row.request.where}: expected a number from 0, which "
                f"skips the prompt, to {LARGEST_WEIGHT:g}."
            )
        return float(weight)

    @property
    def generated(self) -> list[bool]:
        """R values: whether a row of this step was not skipped."""
        return [bool(weight) for _, weight in self._prompts for _ in range(self._trainer.args.num_generations)]

    def note_completions(self, of: dict[str, Tensor]) -> dict[str, Tensor]:
        """Notes how many tokens were generated for each row; returns the rows that were not skipped."""
        self._tokens, kept_R = of["generated"].tolist(), torch.tensor(self.generated)
        return {name: column_R[kept_R] for name, column_R in of.items()}

    def end(self, sums_R3: Any) -> None:
        """Records the visits of a step, by weight, divergence and tokens of each row."""
        number = self._trainer.args.num_generations
        for place, (key, weight) in enumerate(self._prompts):
            mine = slice(place * number, (place + 1) * number)
            total, divergence, _ = sums_R3[mine].sum(0).tolist()
            if weight:
                self._last[key] = Visit(
                    step=self._trainer.state.global_step + 1,
                    gap=divergence / total if total else None,
                    rewards=tuple(self.rewards[mine]),
                    tokens=sum(self._tokens[mine]),
                )

    # ---- Checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes the visits into a checkpoint; called by one process."""
        state = {"tokens_saved": self.tokens_saved, "last": {key: astuple(one) for key, one in self._last.items()}}
        (Path(folder) / FILE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")

    def load(self, folder: str) -> None:
        """Continues the visits of a checkpoint, if it has some."""
        if (path := Path(folder) / FILE).exists():
            state = json.loads(path.read_text(encoding="utf-8"))
            self.tokens_saved = state["tokens_saved"]
            self._last = {
                key: Visit(step, gap, tuple(rewards), *counts)
                for key, (step, gap, rewards, *counts) in state["last"].items()
            }


def _key(row: Mapping[str, Any]) -> str:
    return sha256(repr(comparable(row)).encode()).hexdigest()[:16]
