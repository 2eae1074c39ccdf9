"""Rewards completions in the process that generated them, and gives each row its advantage among those of its prompt.

B rows of this process · R rows of all · F reward functions
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from pandas import DataFrame
from torch import Tensor

from trl_opsd._compat.trl import DistillationTrainer, nanstd, parse_response
from trl_opsd.config import OPSDConfig
from trl_opsd.data.readers import Request
from trl_opsd.rewards.advantages import advantages, total
from trl_opsd.rewards.functions import Rewards
from trl_opsd.rewards.given import NOT_PASSED
from trl_opsd.types import Rollout

__all__ = ["Rewarded"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Rows of an evaluation, each once, in the order of generation; texts are collected for `log_completions` only."""

    rewards: list[Tensor] = field(default_factory=list)
    """[*, F] each."""
    prompts: list[str] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)


class Rewarded(DistillationTrainer):
    """A trainer that calls reward functions: in evaluations always, in training where the loss uses them.

    They are called before rows are exchanged, so that the completions of a prompt are adjacent.
    """

    args: OPSDConfig
    record: Callable[[str, float], None]
    phase: Callable[[str], AbstractContextManager[None]]
    gather_distinct_rows: Callable[[Tensor], Tensor]
    reads_solutions: bool
    _rewards: Rewards | None = None
    """The reward functions; `None` without `reward_funcs`."""
    _conversations: list[Any] | None = None
    """The completions of a batch with the tools' results, as messages."""
    _evaluated: Evaluated | None = None
    """Of the current evaluation."""

    # ---- The rows of a batch ------------------------------------------------------------------------------------

    def note_rewards(self, batch: Mapping[str, Any], rows: Sequence[Request]) -> None:
        """Rewards the completions of a generation batch, and sets the advantages of its rows. Collective."""
        is_learned = self.model.training and self.args.reward_weight > 0
        if self._rewards is None or not (is_learned or self._evaluated is not None):
            return
        with self.phase("reward"):
            rewards_BF = self._rewards_of(self._rewards, batch, rows)
            if not is_learned:
                assert self._evaluated is not None, "an evaluation is under way"
                self._note_evaluated(self._evaluated, self.gather_distinct_rows(rewards_BF).cpu(), batch)
                return
            self._tell_advantages(self._rewards, self.accelerator.gather(rewards_BF).cpu(), rows)

    def _note_evaluated(self, evaluated: Evaluated, rewards_RF: Tensor, batch: Mapping[str, Any]) -> None:
        """Collects the rewards of a batch, and its texts where they are saved. Collective."""
        evaluated.rewards.append(rewards_RF)
        if self.log_completions:
            rollout = Rollout.unpack(batch)
            lists = {"prompts": rollout.prompt_lists(), "completions": rollout.completion_lists()}
            for name, ids in lists.items():
                texts = gather_object(self.processing_class.batch_decode(ids, skip_special_tokens=True))
                getattr(evaluated, name).extend(texts[: len(rewards_RF)])  # the others pad the last batch

    def _tell_advantages(self, rewards: Rewards, rewards_RF: Tensor, rows: Sequence[Request]) -> None:
        """Sets the advantage of each row of this process among those of its prompt, and logs."""
        args = self.args
        # From the rewards of all processes, as the completions of a prompt may be in several.
        found = advantages(
            rewards_RF, rewards.weights, args.num_generations, args.scale_rewards, args.multi_objective_aggregation
        )
        first = self.accelerator.process_index * len(rows)
        for row, value in zip(rows, found.values[first : first + len(rows)].tolist(), strict=True):
            row.advantage = value
        self._record_rewards(rewards, rewards_RF)
        self.record("frac_reward_zero_std", float(found.is_flat.float().mean()))

    def pulls_of(self, rows: Sequence[Request]) -> dict[str, Tensor]:
        """The pull of each row on its own tokens, [B], as the batch holds it; empty where none has any."""
        args = self.args
        if not (self.model.training and args.pulls):
            return {}
        pulls = [args.reward_weight * row.advantage + args.sft_weight * bool(row.is_off_policy) for row in rows]
        return {"pull": torch.tensor(pulls, dtype=torch.float32, device=self.accelerator.device)}

    # ---- Calling the functions ----------------------------------------------------------------------------------

    def _rewards_of(self, rewards: Rewards, batch: Mapping[str, Any], rows: Sequence[Request]) -> Tensor:
        """[B, F], on the accelerator's device; NaN for a completion of the dataset, which is not the student's."""
        metrics: dict[str, list[float]] = defaultdict(list)
        numbers = [number for number, row in enumerate(rows) if not row.is_off_policy]
        asked = [rows[number] for number in numbers]
        given = self._given_to_functions(asked, self._completions_of(batch, rows), numbers)
        given["log_metric"] = lambda name, value: metrics[name].append(float(value))
        found = torch.full((len(rows), len(rewards.functions)), torch.nan)
        found[numbers] = rewards.of(given, [row.where for row in asked])
        self._record_metrics(metrics)
        return found.to(self.accelerator.device)

    def _given_to_functions(
        self, rows: Sequence[Request], written: tuple[list[Any], list[list[int]]], numbers: Sequence[int]
    ) -> dict[str, Any]:
        """Arguments of the reward functions; copies of what the rows hold, since functions may change them."""
        texts, ids = written
        names = [name for name in (rows[0] if rows else ()) if name not in NOT_PASSED]
        columns = {name: [row.get(name) for row in rows] for name in names}
        if self.reads_solutions and "privileged_context" in columns:  # the dataset may have called it `solution`
            columns.setdefault("solution", columns["privileged_context"])
        return {
            **deepcopy({**columns, "prompts": [row["prompt"] for row in rows]}),
            "completions": [texts[number] for number in numbers],
            "completion_ids": [ids[number] for number in numbers],
            "trainer_state": self.state,
        }

    def _completions_of(self, batch: Mapping[str, Any], rows: Sequence[Request]) -> tuple[list[Any], list[list[int]]]:
        """The completions of a batch in the form of its prompts, text or messages, and their token ids."""
        rollout = Rollout.unpack(batch)
        ids = rollout.completion_lists()
        conversations, self._conversations = self._conversations, None
        if conversations is not None:
            return conversations, ids
        if isinstance(rows[0]["prompt"], str):
            return self.processing_class.batch_decode(ids, skip_special_tokens=True), ids
        tokenizer = self._tokenizer
        if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            pad, prompts = [tokenizer.pad_token_id], rollout.prompt_lists()
            # An empty completion cannot be parsed, so a padding token stands for it.
            parsed = [parse_response(tokenizer, one or pad, prefix=of) for one, of in zip(ids, prompts, strict=True)]
            return [[message] for message in parsed], ids
        texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts], ids

    # ---- The log ------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As transformers', and records the rewards of all rows; with `log_completions` saves them with texts."""
        loop = partial(
            super().evaluation_loop, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if self._rewards is None:
            return loop()
        found = self._evaluated = Evaluated()
        try:
            output = loop()
        finally:
            self._evaluated = None
        if found.rewards:
            rewards_RF = torch.cat(found.rewards)
            self._record_rewards(self._rewards, rewards_RF)
            if self.log_completions and self.accelerator.is_main_process:
                self._save_samples(self._rewards, found, rewards_RF, metric_key_prefix)
        return output

    def _save_samples(self, rewards: Rewards, found: Evaluated, rewards_RF: Tensor, prefix: str) -> None:
        """Writes a table of an evaluation, one line per row, beside those that TRL writes of trainings."""
        folder, step = Path(self.args.output_dir) / "completions", self.state.global_step
        folder.mkdir(parents=True, exist_ok=True)
        table = {"step": step, "prompt": found.prompts, "completion": found.completions}
        scores = {name: rewards_RF[:, at].tolist() for at, name in enumerate(rewards.functions)}
        DataFrame({**table, **scores}).to_parquet(folder / f"{prefix}_{step:05d}.parquet")

    def _record_rewards(self, rewards: Rewards, rewards_RF: Tensor) -> None:
        named = {f"rewards/{name}": rewards_RF[:, at] for at, name in enumerate(rewards.functions)}
        for name, values_R in named.items():
            self.record(f"{name}/mean", float(values_R.nanmean()))
            self.record(f"{name}/std", float(nanstd(values_R)))
        totals_R = total(rewards_RF, rewards.weights)
        self.record("reward", float(totals_R.nanmean()))
        self.record("reward_std", float(nanstd(totals_R)))

    def _record_metrics(self, mine: Mapping[str, Sequence[float]]) -> None:
        """Records what functions have logged: means over the calls of `log_metric` in all processes. Collective."""
        everyone = gather_object([dict(mine)])
        for name in sorted({name for theirs in everyone for name in theirs}):
            values = [value for theirs in everyone for value in theirs.get(name, ())]
            self.record(name, sum(values) / len(values))
