"""Has several completions generated for each prompt, in adjacent rows of a generation batch, and compares them.

R rows of a generation batch, over all processes · G prompts · n completions of each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from trl_opsd._compat.trl import DistillationTrainer, repeat_iterable_dataset
from trl_opsd._compat.versions import set_known
from trl_opsd.config import OPSDConfig
from trl_opsd.data.intake import Request
from trl_opsd.types import LossParts

__all__ = ["SEAMS", "Generations", "spread"]

SEAMS: dict[str, tuple[str, ...]] = {
    "get_train_dataloader": ("self",),
    "_get_train_sampler": ("self", "dataset"),
    "_get_dataloader": (
        "self",
        "dataset",
        "description",
        "batch_size",
        "sampler_fn",
        "is_training",
        "dataloader_key",
    ),
}
"""Overridden methods of TRL's trainer, with their parameters; a test compares them with the installed ones."""

_KEPT = [LossParts.ROW_NAMES.index(name) for name in ("weight", "divergence", "tokens")]
"""Columns kept of a row: the sum of its weights, its divergence times weight in nats, and its number of tokens."""


class Generations(DistillationTrainer):
    """A trainer that repeats rows as TRL's GRPO trainer does: each in `num_generations` consecutive places of a batch.

    Places are counted over all processes, so several may generate and train on the completions of a prompt.
    """

    args: OPSDConfig
    record: Callable[[str, float], None]
    row_group: Any
    _learned_rows: Tensor | None = None
    """[R, 3], sums of the rows of this step that this process has trained on; 0 for other rows."""
    _evaluated_rows: list[Tensor] | None = None
    """[*, 3] each, the rows of the current evaluation, in their order."""

    @property
    def _evaluated_generations(self) -> int:
        return self.args.num_generations_eval or self.args.num_generations

    @property
    def _rows_of_step(self) -> int:
        calls = self.args.gradient_accumulation_steps
        return self.args.per_device_train_batch_size * self.accelerator.num_processes * calls

    # ---- The order of the rows ----------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        sampler = super()._get_train_sampler(dataset)
        number = self.args.num_generations
        # TRL's sampler repeats each of `batch_size` prompts, so that a step has as many rows as before.
        set_known(sampler, mini_repeat_count=number, batch_size=sampler.batch_size // number)
        return sampler

    def get_train_dataloader(self) -> DataLoader:
        """As TRL's, which repeats the rows of a stream for accumulation only."""
        stream, number = self.train_dataset, self.args.num_generations
        if number == 1 or not isinstance(stream, IterableDataset):
            return super().get_train_dataloader()
        if self.shuffle_dataset:
            stream = stream.shuffle(seed=self.args.seed)
        calls = self.args.gradient_accumulation_steps
        return self._get_dataloader(
            dataset=repeat_iterable_dataset(stream, number, self._rows_of_step // number, calls),
            description="Training",
            batch_size=self._train_batch_size * calls,
            is_training=True,
        )

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        number = self._evaluated_generations
        if not is_training and number > 1:
            if isinstance(dataset, IterableDataset):
                dataset = repeat_iterable_dataset(dataset, number)
            else:  # the rows themselves: accelerate has to know how many there are, not a sampler alone
                order = range(len(dataset)) if sampler_fn is None else list(sampler_fn(dataset))
                dataset, sampler_fn = dataset.select(np.repeat(order, number)), SequentialSampler
        return super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def number_rows(self, rows: Sequence[Request]) -> None:
        """Sets the place of each row in the generation batch, over all processes."""
        first = self.accelerator.process_index * len(rows)
        for place, row in enumerate(rows, start=first):
            row.place = place

    # ---- Completions of a prompt compared -----------------------------------------------------------------------

    def note_learned(self, rows: Sequence[Any] | None, sums: Tensor) -> None:
        """Adds the sums of a micro-batch, [B, columns], to those of its step, where its rows have places."""
        places = [getattr(row, "place", None) for row in rows or ()]  # none where the user built the batch
        if self.args.num_generations == 1 or self.row_group is not None or None in places or not places:
            return
        if self._learned_rows is None:
            self._learned_rows = sums.new_zeros(self._rows_of_step, len(_KEPT))
        self._learned_rows.index_add_(0, torch.tensor(places, device=sums.device), sums[:, _KEPT])

    def record_learned(self) -> None:
        """Records how the completions of each prompt of a step differ. Collective."""
        learned, self._learned_rows = self._learned_rows, None
        if self.args.num_generations == 1 or self.row_group is not None:
            return
        if learned is None:  # other processes may have some, and the reduction is collective
            learned = torch.zeros(self._rows_of_step, len(_KEPT), device=self.accelerator.device)
        # Several processes may have trained on the completions of one prompt.
        self._record(self.accelerator.reduce(learned, "sum"), self.args.num_generations)

    def note_evaluated(self, sums: Tensor) -> None:
        """Keeps the sums of an evaluation batch, of all processes, in the order of the rows."""
        if self._evaluated_rows is not None and self._evaluated_generations > 1 and self.row_group is None:
            self._evaluated_rows.append(sums[:, _KEPT])

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', and records how the completions of each prompt differ."""
        found: list[Tensor] = []
        self._evaluated_rows = found
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self._evaluated_rows = None
        if found:
            self._record(torch.cat(found), self._evaluated_generations)
        return output

    def _record(self, sums: Tensor, number: int) -> None:
        for name, value in spread(sums, number).items():
            self.record(name, value)


def spread(sums_R3: Tensor, number: int) -> dict[str, float]:
    """Mean over prompts of the standard deviation among their completions; empty if no prompt has two that count."""
    # Columns as in `_KEPT`, completions of a prompt adjacent. Deviations are those of TRL's GRPO for rewards: n - 1.
    weight_Gn, divergence_Gn, tokens_Gn = sums_R3.double().view(-1, number, len(_KEPT)).unbind(-1)
    counted_Gn = weight_Gn > 0
    several_G = counted_Gn.sum(1) > 1
    if not several_G.any():
        return {}
    mean_Gn = torch.where(counted_Gn, divergence_Gn / weight_Gn, torch.nan)
    return {
        "group/divergence_std": _deviation(mean_Gn[several_G]),
        "group/length_std": _deviation(torch.where(counted_Gn, tokens_Gn, torch.nan)[several_G]),
    }


def _deviation(values_Gn: Tensor) -> float:
    """Mean over prompts of the standard deviation of their values that are not NaN; each prompt has at least two."""
    squares_Gn = (values_Gn - values_Gn.nanmean(1, keepdim=True)).square()
    freedom_G = (~values_Gn.isnan()).sum(1) - 1
    return float((squares_Gn.nansum(1) / freedom_G).sqrt().mean())
