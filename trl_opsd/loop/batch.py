"""Makes a generation batch: rows of a data loader in, what the loss reads out, on one path for all who need one.

B rows · P prompt tokens · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_opsd.loop.dealing import Dealer
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.scoring import Scorer
from trl_opsd.loop.step_stats import StepStats
from trl_opsd.methods.base import Generated
from trl_opsd.methods.rows import BatchRow, Written

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer


class Batches:
    """Generation batches of trainings and evaluations, in TRL's form: a dict of row-aligned tensors and lists.

    parse → methods: before → tokenize → generate → count → methods: generated → exchange between processes → teach →
    methods: weigh
    """

    def __init__(
        self,
        host: OPSDTrainer,
        generation: Generation,
        dealer: Dealer,
        scorer: Scorer,
        stats: StepStats,
        metrics: Mapping[str, dict[str, list[float]]],
        texts: Mapping[str, Any],
    ) -> None:
        self._host, self._generation, self._dealer, self._scorer = host, generation, dealer, scorer
        self._stats, self._metrics, self._texts = stats, metrics, texts

    def make(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of these rows. Collective."""
        host = self._host
        rows = host.begin_batch(inputs)
        written = self._generation.write(rows, host.prompt_ids_of(rows))
        host.turns.end(rows)
        batch = self.note(rows, written)
        # A teacher that was notified of a row reads it in the process that generated it.
        batch, rows = self._dealer.exchanged(batch, rows, self._generation.notifies_teacher)
        batch = self.scored(batch, rows)
        batch["num_items_in_batch"] = host.accelerator.gather(batch["loss_weights"].sum()).sum()
        return batch

    def note(self, rows: Sequence[BatchRow], written: Written) -> dict[str, Tensor]:
        """Counts what was generated for all rows of a batch, shows it to methods, and returns its tokens and masks.

        A skipped row is in no count. Collective.
        """
        host = self._host
        is_training = bool(host.model.training)
        of_all = self._stats.completed(rows, written)
        asked_R = of_all["asked"] > 0
        counts = {name: column_R[asked_R] for name, column_R in of_all.items()}
        if is_training:
            host.state.num_input_tokens_seen += int((counts["prompt"] + counts["length"]).sum())
        numbers = self._metrics["train" if is_training else "eval"]
        for name, value in self._stats.of_completions(counts).items():
            numbers[name].append(value)
        numbers["num_tokens"] = [host.state.num_input_tokens_seen]
        batch = host.padded(written.prompt_ids, written.completions, written.masks)
        if host.log_completions:
            for name in ("prompt", "completion"):
                texts = host.processing_class.batch_decode(batch[f"{name}_ids"], skip_special_tokens=True)
                self._texts[name].extend(gather_object(texts))
        for number, row in enumerate(rows):
            if not row.prompt_weight:  # one token of its prompt is left, as a row has to have one
                batch["prompt_mask"][number, :-1], row.images = 0, None
        # Before rows are exchanged: the completions of a prompt are adjacent.
        host.methods.generated(Generated(rows, written, batch, of_all, is_training))
        return batch

    def scored(self, batch: dict[str, Any], rows: Sequence[BatchRow]) -> dict[str, Any]:
        """The batch with targets, weights and what is added to the divergence. Collective."""
        if self._host.model.training and self._host.methods.pulls:
            pulls = [row.pull for row in rows]
            batch = {**batch, "pull": torch.tensor(pulls, dtype=torch.float32, device=self._host.accelerator.device)}
        return {**batch, **self._scorer.score(batch, rows)}
