"""Makes TRL's evaluations repeatable and their loss a mean over tokens, and keeps completions for `predict`.

N rows of a dataset · C tokens of the longest completion
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, final

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_utils import PredictionOutput

from trl_opsd.config import OPSDConfig
from trl_opsd.loop.step_stats import StepStats
from trl_opsd.monitor.metrics import evaluated_names
from trl_opsd.options.rules import EVALUATION, refuse
from trl_opsd.options.table import check_values
from trl_opsd.parallel.rng import preserved_rng

logger = get_logger(__name__)

__all__ = ["Evaluation", "Predictions"]

NO_TOKEN = -100
"""Padding of predictions, as everywhere in transformers."""


@final
class Predictions(PredictionOutput):
    """What transformers' `predict` returns, three values, and the completions as text.

    Attributes:
        texts (`list[str]`): without special tokens, in the order of the rows; empty where there are no `predictions`.
    """

    texts: list[str]

    @classmethod
    def of(cls, output: PredictionOutput, decode: Callable[..., list[str]]) -> Predictions:
        """The same values, with token ids as text."""
        self = cls(*output)
        rows = () if output.predictions is None else output.predictions
        ids = [row[row != NO_TOKEN] for row in rows]
        self.texts = decode(ids, skip_special_tokens=True) if ids else []
        return self


class Evaluated(Protocol):
    """The trainer, as its evaluations see it."""

    args: OPSDConfig
    accelerator: Accelerator
    state: TrainerState
    eval_dataset: Any


@final
class Evaluation:
    """Makes evaluations repeatable, their loss a mean over tokens, and names all of their metrics by dataset."""

    def __init__(self, trainer: Evaluated, stats: StepStats) -> None:
        self._trainer, self._stats = trainer, stats
        self._completions: Tensor | None = None

    @contextmanager
    def of_dataset(self, prefix: str, recorded: dict[str, list[float]]) -> Iterator[dict[str, float]]:
        """Evaluates with a fixed seed, and leaves training's random state untouched; fills the metrics at its end.

        `recorded` are TRL's numbers of the evaluation, and those of `record`.
        """
        metrics: dict[str, float] = {}
        args = self._trainer.args
        check_values(args, ["eval_temperature"])  # which may be changed between two evaluations
        refuse(EVALUATION, args)
        recorded.clear()  # left by an interrupted evaluation
        with self._stats.evaluation() as accounts, preserved_rng(self._trainer.accelerator.device):
            # The same samples in each evaluation, other ones per process.
            set_seed(args.seed, device_specific=True)
            yield metrics
        # Means without NaN, as in TRL's log.
        known = {name: [one for one in each if not math.isnan(one)] for name, each in recorded.items()}
        found = {
            **accounts.metrics(per_batch=False),
            **{name: sum(each) / len(each) for name, each in known.items() if each},
            "loss": math.nan if accounts.loss is None else accounts.loss,
        }
        if accounts.loss is None:
            logger.warning(
                f"No token counted in this evaluation, so `{prefix}_loss` is not known: all completions are empty, or "
                "their weights are 0."
            )
        # TRL would add them when it logs, under "eval_" for every dataset, and never for `predict`.
        metrics.update({f"{prefix}_{name}": value for name, value in found.items()})
        recorded.clear()
        accounts.clear()

    def keep(self, batch: Mapping[str, Tensor]) -> None:
        """Keeps the completions of a batch for [`take`]."""
        self._completions = batch["completion_ids"].masked_fill(batch["completion_mask"] == 0, NO_TOKEN)

    def take(self) -> Tensor | None:
        """[B, C], the completions of the last batch, padded with -100."""
        completions, self._completions = self._completions, None
        return completions

    def with_best(self, found: dict[str, float], rewards: Collection[str]) -> dict[str, float]:
        """The metrics, with NaN for a `metric_for_best_model` that has no value in this evaluation.

        NaN is never the best, and is not logged; transformers ends a training that lacks the metric.
        """
        best = f"eval_{(self._trainer.args.metric_for_best_model or '').removeprefix('eval_')}"
        known, beginnings = evaluated_names(self._trainer.eval_dataset, rewards)
        if best in known or best.startswith(beginnings) or any(best in log for log in self._trainer.state.log_history):
            found.setdefault(best, math.nan)
        return found
