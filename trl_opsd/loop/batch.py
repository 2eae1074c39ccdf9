"""Makes a generation batch: rows of a data loader in, what the loss reads out, on one path for all who need one.

B rows · P prompt tokens · C completion tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from trl_opsd.loop.collapse import CollapseGuard
from trl_opsd.loop.dealing import Dealer
from trl_opsd.loop.generation import Generation
from trl_opsd.loop.rows import BatchRow, Written
from trl_opsd.loop.scoring import Scorer
from trl_opsd.loop.step_stats import StepStats
from trl_opsd.loop.trainer_host import TrainerHost

if TYPE_CHECKING:
    from trl_opsd.loop.batch_rewards import BatchRewards


class Batches:
    """Generation batches of trainings and evaluations, in TRL's form: a dict of row-aligned tensors and lists.

    parse → weigh prompts → tokenize → generate → count and reward → exchange between processes → teach → weigh
    """

    def __init__(
        self,
        host: TrainerHost,
        generation: Generation,
        dealer: Dealer,
        scorer: Scorer,
        stats: StepStats,
        collapse: CollapseGuard,
        metrics: Mapping[str, dict[str, list[float]]],
        texts: Mapping[str, Any],
    ) -> None:
        self._host, self._generation, self._dealer, self._scorer = host, generation, dealer, scorer
        self._stats, self._collapse, self._metrics, self._texts = stats, collapse, metrics, texts
        self.rewards: BatchRewards | None = None
        """Only with `reward_funcs`."""

    def make(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of these rows. Collective."""
        host = self._host
        rows = host.begin_batch(inputs)
        written = self._generation.write(rows, host.prompt_ids_of(rows))
        host.turns.end(rows)
        batch = self.note(rows, written)
        if host.model.training and host.args.teacher_control == "shuffled":
            host.teaching.prompts.shuffle(rows, written.completions)
        # A teacher that was notified of a row reads it in the process that generated it.
        batch, rows = self._dealer.exchanged(batch, rows, self._generation.notifies_teacher)
        batch = self.scored(batch, rows)
        batch["num_items_in_batch"] = host.accelerator.gather(batch["loss_weights"].sum()).sum()
        return batch

    def note(self, rows: Sequence[BatchRow], written: Written) -> dict[str, Tensor]:
        """Counts and rewards what was generated for all rows of a batch; returns its tokens and masks. Collective."""
        host = self._host
        counts = self._stats.completed(rows, written)
        is_training = host.model.training
        if host.visits is not None and is_training:
            counts = host.visits.note_completions(counts)
        self._collapse.note_completions(counts)
        if is_training:
            host.state.num_input_tokens_seen += int((counts["prompt"] + counts["length"]).sum())
            if host.args.completion_length_start is not None:
                host.record("completions/limit", host.limits.completion)
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
        if self.rewards is not None:
            self.rewards.note(batch, rows, written.conversations)  # before rows are exchanged
        return batch

    def scored(self, batch: dict[str, Any], rows: Sequence[BatchRow]) -> dict[str, Any]:
        """The batch with targets, weights and what rewards add. Collective."""
        args = self._host.args
        if self._host.model.training and args.pulls:
            reward, sft, constant = args.reward_weight, args.sft_weight, args.constant_advantage
            pulls = [constant + reward * row.advantage + sft * bool(row.is_off_policy) for row in rows]
            batch = {**batch, "pull": torch.tensor(pulls, dtype=torch.float32, device=self._host.accelerator.device)}
        return {**batch, **self._scorer.score(batch, rows)}
