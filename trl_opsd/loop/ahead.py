"""Generates the rows of the next step while those of this one train, with weights that are one step old.

How far these are from the current ones is measured by full distributions, over a few tokens of each process.

N tokens · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd.loop.overlap import Overlapping
from trl_opsd.models.backbone import completion_hidden, preserved_mode
from trl_opsd.models.head import logits_of, whole_head
from trl_opsd.models.padding import Reading
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.pulled import Pulled
from trl_opsd.types import Rollout

__all__ = ["SEAMS", "Ahead"]

logger = get_logger(__name__)

SEAMS: dict[str, tuple[str, ...]] = {
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""

PROBED = 32
"""Maximum tokens of a process whose distributions are kept until the next step; each is a whole vocabulary."""


class _Written:
    """Prompts of the next step, and their completions as they are generated."""

    def __init__(self, prompt_ids: list[list[int]], rows: Pulled[tuple[int, list[int]]]) -> None:
        self.prompt_ids = prompt_ids
        self._rows = rows
        self._came: dict[int, list[int]] = {}

    def all(self) -> list[list[int]]:
        """Waits for all completions; in the order of the prompts."""
        with suppress(StopIteration):
            while True:
                self._came.update(self._rows.take(wait=True))
        return [self._came[row] for row in range(len(self.prompt_ids))]

    def close(self) -> None:
        """Cancels what is not generated yet."""
        self._rows.close()


class Ahead(Overlapping):
    """A trainer that may generate the rows of a step while it trains on those of the step before."""

    in_student: Callable[..., Any]
    temperature: float
    steps_ahead = 0
    """Offset from the step being trained to the step whose rows are read."""
    _coming: tuple[Iterator[Any], Any] | None = None
    """The epoch iterator, and the batch of the next step that it returned."""
    _ahead: _Written | None = None
    _before_step: tuple[Rollout, Tensor] | None = None
    """A row of this step, and the student's log-probabilities for it before this step, [N, V], in host memory."""

    @property
    def writes_ahead(self) -> bool:
        """Whether the rows of the next step are generated while those of this one train."""
        return self.args.overlap == "ahead"

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; rows generated for a step that never comes are cancelled."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._give_up()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """As transformers'; with `overlap='ahead'` it also reads the rows of the next step."""
        if not self.writes_ahead:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        known, self._coming = self._coming, None
        if known is not None and known[0] is epoch_iterator:
            found = known[1]
        else:
            self._give_up()  # an epoch ended early: what was read belongs to an iterator that is gone
            found = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step + 1 < self.state.max_steps:  # the last step has no next one
            calls = self.args.gradient_accumulation_steps
            self._coming = epoch_iterator, super().get_batch_samples(epoch_iterator, calls, device)
        return found

    def _from_rollout(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The completions generated ahead for these prompts, while generation of the next step starts. Collective."""
        if not (self.writes_ahead and self.model.training):
            return super()._from_rollout(prompt_ids)
        completions = self._taken(prompt_ids)
        self.record("overlap/staleness", float(completions is not None))
        if completions is None:
            completions = super()._from_rollout(prompt_ids)
        self._begin_ahead()
        # After the request for the next rows: the server generates while this forward runs.
        self._before_step = self._probed(prompt_ids, completions)
        return completions

    def _taken(self, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """The completions generated ahead; `None` if there are none or the weights have moved too far. Collective."""
        ahead = self._ahead
        if ahead is None:
            return None
        completions = ahead.all()
        self._ahead = None
        # Gathered, so that all processes raise: one alone would leave the others waiting in a collective.
        others = torch.tensor([ahead.prompt_ids != prompt_ids], device=self.accelerator.device)
        if self.accelerator.gather(others).any():
            raise ValueError(
                "`overlap='ahead'`: the prompts of a step are not those that were read for it while the last one was "
                f"learned. Does a method of {type(self).__name__} change rows? Do it in the dataset, or leave the "
                "option out."
            )
        distance = self._distance()
        self.record("overlap/divergence", distance)
        if distance <= self.args.overlap_max_divergence:
            return completions
        logger.warning(
            f"The last step has moved the student by {distance:.3g} nats per token, more than "
            f"`overlap_max_divergence={self.args.overlap_max_divergence}`: the rows that were written before it are "
            "written anew. If that happens often, lower the learning rate, or leave `overlap` out."
        )
        return None

    def _begin_ahead(self) -> None:
        """Starts to generate the rows of the next step with the weights of this one."""
        if self._coming is None or not self._coming[1][0]:
            return
        self.steps_ahead = 1
        try:
            rows = self.read_rows(self._coming[1][0][0])
            prompt_ids = self._tokenize_prompts(deepcopy([row["prompt"] for row in rows]))[0]
        finally:
            self.steps_ahead = 0
        self._ahead = _Written(prompt_ids, Pulled(self.stream(prompt_ids)))

    def wait_for_rows(self) -> None:
        """Waits for rows generated ahead: the rollout must be idle before other rows or a weight sync."""
        if self._ahead is not None:
            self._ahead.all()

    def _give_up(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._coming = self._before_step = None

    # ---- How far the generating weights are from the current ones ---------------------------------------------------

    def _probed(self, prompt_ids: list[list[int]], completions: list[list[int]]) -> tuple[Rollout, Tensor]:
        # The longest row gives most tokens; all are of one row, so that the measurement is one short forward.
        row = max(range(len(completions)), key=lambda number: min(len(completions[number]), PROBED))
        rollout = Rollout.unpack(self.padded(prompt_ids[row : row + 1], [completions[row][:PROBED]]))
        return rollout, self._log_probabilities(rollout)

    def _distance(self) -> float:
        """KL(student before the last step ‖ student now) per token in nats, over all processes. Collective."""
        assert self._before_step is not None, "there is one since rows are written ahead"
        rollout, before_NV = self._before_step
        after_NV = self._log_probabilities(rollout)
        sums = torch.stack([(before_NV.exp() * (before_NV - after_NV)).sum(), torch.tensor(float(len(before_NV)))])
        total, tokens = self.accelerator.reduce(sums.to(self.accelerator.device), "sum").tolist()
        return float(total / tokens) if tokens else 0.0

    def _log_probabilities(self, rollout: Rollout) -> Tensor:
        """[N, V], of the loss tokens of a row, in host memory. Collective where the student is sharded."""
        with preserved_mode(self.model), torch.no_grad(), autocast(self.accelerator):
            self.model.eval()
            logits_NV: Tensor = self.in_student(_logits, rollout, self.reading)
        return (logits_NV.float() / self.temperature).log_softmax(-1).cpu()


def _logits(student: CausalLM, rollout: Rollout, reading: Reading) -> Tensor:
    """[N, V], at the loss tokens of a rollout."""
    hidden_BCH = completion_hidden(student, rollout, reading)
    with whole_head(student) as head:
        return logits_of(hidden_BCH[rollout.counts], head)
