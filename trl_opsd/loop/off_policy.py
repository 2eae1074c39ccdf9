"""Takes the completions of some rows from the dataset or the teacher, and lets the student generate the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import completion_ids
from trl_opsd.data.prompts import PromptLimits
from trl_opsd.data.readers import Request
from trl_opsd.parallel.rng import derived_seed
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
    placeholders: list[int]
    _be_ready_to_write: Callable[[], None]
    _requests: Sequence[Request]
    _sources: Tensor | None = None
    """[2, 3], on-policy and off-policy rows of this step: number, weights, and divergences times weight in nats."""

    def let_teachers_write(self) -> None:
        """Prepares [`of_teachers`]; raises `ValueError` if a teacher cannot generate."""
        raise NotImplementedError

    def of_teachers(self, rows: Sequence[Request]) -> list[list[int]]:
        """The completion of each row by its own teacher; of at least one row."""
        raise NotImplementedError

    @property
    def limits(self) -> PromptLimits:
        raise NotImplementedError

    def choose_sources(self, rows: Sequence[Request]) -> None:
        """Marks the rows of a generation batch, which have their places, as on- or off-policy."""
        for row in rows:
            # Uniform in [0, 1), independent of torch's random state: a resumed run draws the same.
            drawn = derived_seed(self.args.seed, self.state.global_step, row.place or 0) / 2**63
            row.is_off_policy = self.model.training and drawn >= self.args.lmbda

    def mixed(
        self, prompt_ids: list[list[int]], write: Callable[[list[list[int]]], list[list[int]]]
    ) -> list[list[int]]:
        """A completion for each prompt, from the dataset, the teacher or, through `write`, the student. Collective."""
        if self.args.lmbda == 1 or not self.model.training:
            return write(prompt_ids)
        self._be_ready_to_write()  # verifies the student, even if it generates nothing in this batch
        given = {number: row for number, row in enumerate(self._requests) if row.is_off_policy}
        if self.args.seq_kd:
            found = dict(zip(given, self.of_teachers(list(given.values())) if given else [], strict=True))
        else:
            found = {number: self._of_dataset(row, prompt_ids[number]) for number, row in given.items()}
        rest = [number for number in range(len(prompt_ids)) if number not in found]
        written = self.together([prompt_ids[number] for number in rest], write) or []
        found.update(dict(zip(rest, written, strict=True)))
        return [found[number] for number in range(len(prompt_ids))]

    def together(
        self, prompt_ids: list[list[int]], write: Callable[[list[list[int]]], list[list[int]]]
    ) -> list[list[int]] | None:
        """What `write` generates, which may be collective; `None` where no process has prompts. Collective."""
        rows = torch.tensor([len(prompt_ids)], device=self.accelerator.device)
        return write(prompt_ids) if self.accelerator.gather(rows).any() else None

    def _of_dataset(self, row: Request, prompt_ids: list[int]) -> list[int]:
        most = self.args.max_completion_length
        ids = completion_ids(
            row, row.where, prompt_ids, self._tokenizer, self.chat_template_kwargs, self.eos_token_ids, most
        )
        self.limits.check_known(max(ids, default=0), f"The completion in {row.where}")
        if unknown := set(ids) & set(self.placeholders):
            raise ValueError(
                f"The completion in {row.where} has the token {self._tokenizer.decode([min(unknown)])!r}, which stands "
                "for an image or the like and is never written: remove it, or the row."
            )
        return ids

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
