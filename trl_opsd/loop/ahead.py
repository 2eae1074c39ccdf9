"""Generates the rows of the next step while those of this one train, with weights that are one step old.

How far these are from the current ones is measured by full distributions, over a few tokens of each process.

N tokens · V vocabulary size
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd._compat.sharding import whole_head
from trl_opsd._compat.versions import replaced
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.loader import NextRows
from trl_opsd.models.backbone import completion_hidden, logits_of, preserved_mode
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.parallel.precision import autocast
from trl_opsd.parallel.prefetch import Prefetcher
from trl_opsd.types import Rollout

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)

PROBED = 32
"""Maximum tokens of a process whose distributions are kept until the next step; each is a whole vocabulary."""


class Ahead:
    """Generates the rows of a step while the trainer trains on those of the step before."""

    def __init__(self, host: OPSDTrainer, generation: Generation, next_rows: NextRows) -> None:
        self._host, self._generation, self._next = host, generation, next_rows
        self._coming: tuple[list[list[int]], Prefetcher[tuple[int, list[int]]]] | None = None
        """Prompts of the next step, and their completions as they are generated."""
        self._came: dict[int, list[int]] = {}
        self.before_step: tuple[Rollout, Tensor] | None = None
        """A row of this step, and the student's log-probabilities for it before this step, [N, V], in host memory."""

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """The completions generated ahead for these prompts, while generation of the next step starts. Collective."""
        completions = self._taken(prompt_ids)
        self._host.record("overlap/staleness", float(completions is not None))
        if completions is None:
            completions = self._host.complete(prompt_ids)
        self._begin()
        # After the request for the next rows: the server generates while this forward runs. The longest row gives most
        # tokens; all are of one row, so that the measurement is one short forward.
        row = max(range(len(completions)), key=lambda number: min(len(completions[number]), PROBED))
        rollout = self._host.padded(prompt_ids[row : row + 1], [completions[row][:PROBED]])
        self.before_step = rollout, self._log_probabilities(rollout)
        return completions

    def wait(self) -> None:
        """Waits for rows generated ahead: the rollout must be idle before other rows or a weight sync."""
        if self._coming is not None:
            with suppress(StopIteration):
                while True:
                    self._came.update(self._coming[1].take(wait=True))

    def cancel(self) -> None:
        """Cancels rows generated for a step that never comes."""
        if self._coming is not None:
            self._coming[1].close()
        self._coming = self.before_step = None

    def _taken(self, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """The completions generated ahead; `None` if there are none or the weights have moved too far. Collective."""
        host = self._host
        if self._coming is None:
            return None
        self.wait()
        (known, _), self._coming = self._coming, None
        completions = [self._came[row] for row in range(len(known))]
        # Gathered, so that all processes raise: one alone would leave the others waiting in a collective.
        others = torch.tensor([known != prompt_ids], device=host.accelerator.device)
        if host.accelerator.gather(others).any():
            raise ValueError(
                "`overlap='ahead'`: the prompts of a step differ from those prefetched for it. Does a method of "
                f"{type(host).__name__} change rows? Change them in the dataset, or remove `overlap`."
            )
        distance = self._distance()
        host.record("overlap/divergence", distance)
        if distance <= host.args.overlap_max_divergence:
            return completions
        logger.warning(
            f"The last step moved the student by {distance:.3g} nats per token, more than "
            f"`overlap_max_divergence={host.args.overlap_max_divergence}`: rows generated before it are regenerated. "
            "If this happens often, lower the learning rate, or remove `overlap`."
        )
        return None

    def _begin(self) -> None:
        """Starts to generate the rows of the next step with the weights of this one."""
        if not self._next.rows:
            return
        with replaced(self._host.teaching, steps_ahead=1):
            prompt_ids = self._host.prompt_ids_of(self._host.teaching.read_rows(self._next.rows))
        self._coming, self._came = (prompt_ids, Prefetcher(self._generation.stream(prompt_ids))), {}

    # ---- How far the generating weights are from the current ones ---------------------------------------------------

    def _distance(self) -> float:
        """KL(student before the last step ‖ student now) per token in nats, over all processes. Collective."""
        assert self.before_step is not None, "there is one since rows are generated ahead"
        rollout, before_NV = self.before_step
        after_NV = self._log_probabilities(rollout)
        sums = torch.stack([(before_NV.exp() * (before_NV - after_NV)).sum(), torch.tensor(float(len(before_NV)))])
        total, tokens = self._host.accelerator.reduce(sums.to(self._host.accelerator.device), "sum").tolist()
        return float(total / tokens) if tokens else 0.0

    def _log_probabilities(self, rollout: Rollout) -> Tensor:
        """[N, V], of the loss tokens of a row, in host memory. Collective where the student is sharded."""
        with preserved_mode(self._host.model), torch.no_grad(), autocast(self._host.accelerator):
            self._host.model.eval()
            logits_NV: Tensor = self._host.in_student(_logits, rollout, self._host.batching)
        return (logits_NV.float() / self._host.temperature).log_softmax(-1).cpu()


def _logits(student: CausalLM, rollout: Rollout, reading: BatchPolicy) -> Tensor:
    """[N, V], at the loss tokens of a rollout."""
    hidden_BCH = completion_hidden(student, rollout, reading)
    with whole_head(student) as head:
        return logits_of(hidden_BCH[rollout.counts], head)
