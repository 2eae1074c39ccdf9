"""Weighs a row by its reward, and not at all where its teacher has nothing of its own to say.

B rows of this process
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, final

import torch
from torch import Tensor

from trl_opsd.methods.base import Generated, Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.metrics import BATCHES, Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.table import NUMBER, Option, Values

_GATE = Values(
    "a finite number, 'reward' or 'advantage'", lambda value: value in ("reward", "advantage") or NUMBER.fits(value)
)


@with_help
@dataclass
class GateOptions:
    reward_gate: Annotated[
        float | str | None, Option(_GATE | None, resumed=True, words="rows gated by their reward ({})")
    ] = None
    """In training, which completions of the student count in the loss: those with a reward of at least this number, or
    all, weighted by `"reward"` or by `"advantage"` where these are above 0 (arXiv 2605.06188). When `None`, all
    alike."""


@final
class Gates(Method):
    """Sets the gate of each row by its reward, and logs the gates of all that were generated."""

    whole_rows = False
    metrics: ClassVar = {
        "gate/mean": Metric(
            "1",
            "Weight of a row by its reward; 0 where the teacher has no prompt of its own.",
            Logs(BATCHES, "`reward_gate`, `teacher_context`, or a `teacher_prompt_fn` that takes rewards"),
        ),
    }

    def __init__(self, now: Any) -> None:
        self.needs_rewards, self.in_groups = now.reward_gate is not None, now.reward_gate == "advantage"
        self._of_teachers = now.needs_context and now.environments is not None and now.environments.tells

    @property
    def whole_batch(self) -> bool:
        """Whether a gate depends on rewards."""
        return self.needs_rewards

    @classmethod
    def of(cls, now: Any) -> Gates:
        return cls(now)

    def generated(self, batch: Generated) -> None:
        if (kind := self.host.args.reward_gate) is not None and batch.is_training:
            for row in batch.rows:
                if row.by_student:
                    row.gate *= gate(kind, row.reward, row.advantage)

    def weighed(self, weights: Tensor, rows: Sequence[BatchRow]) -> Tensor:
        of_teachers = self._of_teachers or self.host.methods.reads_outcomes
        if of_teachers or (self.needs_rewards and self.host.model.training):
            gates = [row.gate for row in rows if row.prompt_weight and not row.is_padding]
            device = self.host.accelerator.device
            sums = torch.tensor([sum(gates), len(gates)], dtype=torch.float32, device=device)
            total, count = self.host.accelerator.reduce(sums, "sum").tolist()
            if count:
                self.host.record("gate/mean", total / count, count)
        return weights


def gate(kind: float | str, reward: float | None, advantage: float) -> float:
    """The weight of a completion in the loss by its reward, `None` where it has none: `OPSDConfig.reward_gate`."""
    if reward is None or math.isnan(reward):
        return 0.0
    if isinstance(kind, str):
        return max(0.0, {"reward": reward, "advantage": advantage}[kind])
    return float(reward >= kind)
