"""Lets completions grow: short ones first, up to `max_completion_length` after some steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, final

from trl_opsd.methods.base import Generated, Method
from trl_opsd.monitor.metrics import STEPS, Logs, Metric
from trl_opsd.options.normalize import with_help
from trl_opsd.options.rules import Rule
from trl_opsd.options.table import Need, Option, integer

_GROWS = Need("`completion_length_start` is not set", lambda now: now.completion_length_start is not None)


@with_help
@dataclass
class GrowthOptions:
    completion_length_start: Annotated[
        int | None, Option(integer(1) | None, resumed=True, words="completions of at most {} tokens at first")
    ] = None
    """Most tokens of a completion in the first step of a training, from where the limit rises to
    `max_completion_length`. When `None`, it is the same in all steps."""
    completion_length_steps: Annotated[int, Option(integer(1), (_GROWS,), resumed=_GROWS)] = 100
    """Optimizer steps in which the limit of completions rises from `completion_length_start` to its end."""


@final
class CompletionGrowth(Method):
    """Limits completions by the step."""

    rules = (
        Rule(
            lambda args: (args.completion_length_start or 0) > args.max_completion_length,
            "`completion_length_start={0.completion_length_start}` is above "
            "`max_completion_length={0.max_completion_length}`, to which the limit rises: lower it.",
        ),
    )
    metrics: ClassVar = {
        "completions/limit": Metric(
            "tokens",
            "Most tokens of a completion in this step.",
            Logs(STEPS, "`completion_length_start`", evaluated=False),
        ),
    }

    @classmethod
    def of(cls, now: Any) -> CompletionGrowth | None:
        return None if now.completion_length_start is None else cls()

    def generated(self, batch: Generated) -> None:
        if batch.is_training:
            self.host.record("completions/limit", self.host.methods.limit(self.host.args.max_completion_length))

    def limit(self, tokens: int) -> int:
        args = self.host.args
        left = max(0.0, 1 - self.host.state.global_step / args.completion_length_steps)
        return tokens - int((tokens - args.completion_length_start) * left)
