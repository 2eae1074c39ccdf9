"""Takes the completions of some rows from the dataset or the teacher, and lets the student generate the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.types import LossParts

__all__ = ["OffPolicy"]

_WEIGHT, _DIVERGENCE = (LossParts.ROW_NAMES.index(name) for name in ("weight", "divergence"))


class OffPolicy(DistillationTrainer):
    """A trainer that may train on completions that the student did not generate, as TRL's GKD trainer does.

    Which rows of a step these are follows from `seed`, the step, and the place of a row among those of all processes.
    An evaluation has none.
    """

    args: OPSDConfig
    record: Callable[[str, float], None]
    row_group: Any
    _sources: Tensor | None = None
    """[2, 3], on-policy and off-policy rows of this step: number, weights, and divergences times weight in nats."""

    def note_sources(self, rows: Sequence[Any] | None, sums: Tensor) -> None:
        """Adds the sums of a micro-batch to those of its sources; not of rows without a mark, which no dataset gave."""
        marks = [getattr(row, "is_off_policy", None) for row in rows or ()]
        if self.args.lmbda == 1 or self.row_group is not None or None in marks or not marks:
            return
        if self._sources is None:
            self._sources = sums.new_zeros(2, 3)
        counted = sums[:, _WEIGHT] > 0  # a row repeated only to keep collectives matched has no weight
        values = torch.stack([counted.to(sums.dtype), sums[:, _WEIGHT], sums[:, _DIVERGENCE]], dim=1)
        self._sources.index_add_(0, torch.tensor(marks, device=sums.device).long(), values)

    def record_sources(self) -> None:
        """Records the share of off-policy rows in a step, and the divergence by source. Collective."""
        sources, self._sources = self._sources, None
        if self.args.lmbda == 1 or self.row_group is not None:
            return
        if sources is None:  # other processes may have some, and the reduction is collective
            sources = torch.zeros(2, 3, device=self.accelerator.device)
        (written, *of_student), (given, *of_dataset) = self.accelerator.reduce(sources, "sum").tolist()
        if written + given:
            self.record("off_policy/share", given / (written + given))
        if written:
            self.record("on_policy/divergence", of_student[1] / of_student[0])
        if given:
            self.record("off_policy/divergence", of_dataset[1] / of_dataset[0])
