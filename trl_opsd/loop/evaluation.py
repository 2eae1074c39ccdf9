"""Makes TRL's evaluation repeatable and a mean over tokens, names all metrics by dataset, and lets `predict` return
completions.

N rows of a dataset · C tokens of the longest completion
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler
from transformers.trainer_utils import PredictionOutput

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.data.conversations import solutions_as_context, with_prompts
from trl_opsd.loop.upstream_fixes import Launch
from trl_opsd.monitor.accounts import Accounts
from trl_opsd.monitor.metrics import evaluated_names
from trl_opsd.options.rules import EVALUATION, refuse
from trl_opsd.options.table import check_values
from trl_opsd.parallel.rng import preserved_rng

logger = get_logger(__name__)

__all__ = ["NO_TOKEN", "SEAMS", "Evaluations", "Predictions"]

SEAMS: dict[str, tuple[str, ...]] = {
    "prediction_step": ("self", "model", "inputs", "prediction_loss_only", "ignore_keys"),
    "evaluate": ("self", "eval_dataset", "ignore_keys", "metric_key_prefix"),
    "predict": ("self", "test_dataset", "ignore_keys", "metric_key_prefix"),
    "get_eval_dataloader": ("self", "eval_dataset"),
    "get_test_dataloader": ("self", "test_dataset"),
}
"""Overridden methods of TRL's trainer, with their parameters; a test compares them with the installed ones."""

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


class Evaluations(DistillationTrainer):
    """A trainer whose evaluations can be compared with each other, and whose predictions are completions."""

    reads_solutions: bool = False
    """Whether a column `solution` of a dataset is privileged context."""
    session: Callable[[], AbstractContextManager[None]]
    _accounts: dict[str, Accounts]
    _launch: Launch
    _rewards: Any = None
    _written: Tensor | None = None
    """[B, C], completions of the last batch of an evaluation, padded with -100."""

    def predict(
        self,
        test_dataset: Dataset | IterableDataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> Predictions:
        """Completes the prompts of a dataset, and evaluates the student on them.

        Args:
            test_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
                As `train_dataset`.
            ignore_keys (`list[str]`, *optional*):
                Has no effect; transformers' trainer takes it.
            metric_key_prefix (`str`, *optional*, defaults to `"test"`):
                Prefix of the metrics.

        Returns:
            [`Predictions`]: transformers' `PredictionOutput`. `predictions` are the token ids of the completions,
            [N, C], in the order of the rows, padded with -100; `texts` are the same as text. With
            `prediction_loss_only=True` in the config there are neither. `metrics` are those of `evaluate`; there are no
            `label_ids`.
        """
        if not isinstance(test_dataset, Dataset | IterableDataset):
            raise TypeError(
                f"`test_dataset` is a {type(test_dataset).__name__}: expected a `datasets.Dataset` or "
                "`IterableDataset`; call `predict` once for each of several."
            )
        self._launch.restore()
        with self.session():
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
        return Predictions.of(output, self.processing_class.batch_decode)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As TRL's; all batches of all datasets are generated in one session of the rollout.

        A `metric_for_best_model` without a value in this evaluation is returned as NaN, which is never the best, and is
        not logged.
        """
        self._launch.restore()
        with self.session():
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        best = f"eval_{(self.args.metric_for_best_model or '').removeprefix('eval_')}"
        if metric_key_prefix == "eval" and self._is_logged(best):
            found.setdefault(best, math.nan)  # transformers ends a training that lacks it
        return found

    def _is_logged(self, name: str) -> bool:
        """Whether evaluations may log a metric, though perhaps not each of them."""
        known, beginnings = evaluated_names(self.eval_dataset, self._rewards.functions if self._rewards else ())
        return name in known or name.startswith(beginnings) or any(name in log for log in self.state.log_history)

    def as_read(self, datasets: Any, where: str) -> Any:
        """Datasets with their columns renamed to ours."""
        datasets = with_prompts(datasets, where)
        return solutions_as_context(datasets) if self.reads_solutions else datasets

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """As TRL's, but renames columns, as the dataset may not have been there at construction."""
        return super().get_eval_dataloader(self.as_read(eval_dataset, "eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """As transformers', but in the order of the rows; TRL shuffles what it evaluates."""
        return self._get_dataloader(
            dataset=self.as_read(test_dataset, "test_dataset"),
            description="test",
            batch_size=self.args.eval_batch_size,
            sampler_fn=SequentialSampler,
        )

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple:
        with self._accounts["eval"].clock("compare"):
            loss, _, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        written, self._written = self._written, None
        return loss, None if prediction_loss_only else written, labels

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As TRL's, but with a fixed seed, training's random state untouched, and the loss a mean over tokens."""
        check_values(self.args, ["eval_temperature"])  # which may be changed between two evaluations
        refuse(EVALUATION, self.args)
        accounts = self._accounts["eval"]
        self._metrics["eval"].clear()  # left by an interrupted evaluation
        accounts.clear()
        with preserved_rng(self.accelerator.device):
            # The same samples in each evaluation, other ones per process.
            set_seed(self.args.seed, device_specific=True)
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        found = {**accounts.metrics(per_batch=False), **self._means()}
        found["loss"] = math.nan if accounts.loss is None else accounts.loss
        if accounts.loss is None:
            logger.warning(
                f"No token counted in this evaluation, so `{metric_key_prefix}_loss` is not known: all completions are "
                "empty, or their weights are 0."
            )
        # TRL would add them when it logs, under "eval_" for every dataset, and never for `predict`.
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        self._metrics["eval"].clear()
        accounts.clear()
        return output

    def _means(self) -> dict[str, float]:
        """Means, without NaN as in TRL's log, of what TRL and `record` have collected in this evaluation."""
        known = {name: [one for one in each if not math.isnan(one)] for name, each in self._metrics["eval"].items()}
        return {name: sum(each) / len(each) for name, each in known.items() if each}
