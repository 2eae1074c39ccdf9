"""Takes the completions of some rows from the dataset or the teacher, and lets the student generate the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import completion_ids
from trl_opsd.data.intake import Request
from trl_opsd.data.prompts import PromptLimits
from trl_opsd.parallel.rng import derived_seed

__all__ = ["OffPolicy"]


class OffPolicy(DistillationTrainer):
    """A trainer that may train on completions that the student did not generate, as TRL's GKD trainer does.

    Which rows of a step these are follows from `seed`, the step, and the place of a row among those of all processes.
    An evaluation has none.
    """

    args: OPSDConfig
    placeholders: list[int]
    _be_ready_to_write: Callable[[], None]
    _requests: Sequence[Request]

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
