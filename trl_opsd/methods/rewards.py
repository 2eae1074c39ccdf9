"""Rewards completions in the process that generated them, and gives each row its advantage among those of its prompt.

B rows of this process · R rows of all · F reward functions · G prompts · n completions of each
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

import torch
from accelerate.utils import gather_object
from pandas import DataFrame
from torch import Tensor

from trl_opsd._compat.trl import nanstd, parse_response
from trl_opsd.data.outcomes import Outcome, texts_of
from trl_opsd.methods.base import Generated, Method
from trl_opsd.methods.rows import BatchRow
from trl_opsd.metrics import STEPS, WEIGHTED, WITH_REWARDS, Logs, Metric
from trl_opsd.models.checks import whole_checkpoint
from trl_opsd.options.normalize import with_help
from trl_opsd.options.table import NUMBERS, Option, at_least, one_of
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.rewards.functions import RewardModel, Rewards, loaded_model
from trl_opsd.rewards.given import NOT_PASSED, Given
from trl_opsd.types import Rollout

_EPSILON = 1e-4
"""Added to each standard deviation before a division, as in TRL."""
_REWARDS = Logs(
    "all processes; over all rows of an evaluation, or over those of a step and then the mean over steps",
    f"{WITH_REWARDS}; where a function gave one",
)


@with_help
@dataclass
class RewardOptions:
    reward_weight: Annotated[
        float,
        Option(at_least(0), resumed=True, words="plus {:g} times the policy gradient of rewards"),
    ] = 0.0
    """Weight of the policy gradient of `reward_funcs` beside the divergence. At 0 the trainer only logs rewards."""
    reward_weights: Annotated[list[float] | None, Option(NUMBERS | None, resumed=True)] = None
    """Weight of each reward function in their sum, as in TRL's `GRPOConfig`. When `None`, each has 1."""
    scale_rewards: Annotated[str, Option(one_of("group", "batch", "none"), resumed=True)] = "group"
    """Whose standard deviation divides the rewards, as in TRL's `GRPOConfig`: of a prompt's rewards (`"group"` or
    `True`), of the step's (`"batch"`), or none (`"none"` or `False`)."""
    multi_objective_aggregation: Annotated[
        str, Option(one_of("sum_then_normalize", "normalize_then_sum"), resumed=True)
    ] = "sum_then_normalize"
    """Whether the trainer scales the sum of several rewards, or each before it adds them, as in TRL's `GRPOConfig`."""


@final
class BatchRewards(Method):
    """Calls reward functions; where training does not depend on rewards, it logs them, and nothing else changes."""

    whole_rows = False
    metrics: ClassVar = {
        "rewards/<name>/mean": Metric("of the function", "Mean of this function's rewards, without `None`.", _REWARDS),
        "rewards/<name>/std": Metric("of the function", "Standard deviation of this function's rewards.", _REWARDS),
        "reward": Metric("of the functions", "Sum of a completion's rewards times `reward_weights`.", _REWARDS),
        "reward_std": Metric("of the functions", "Standard deviation of `reward`.", _REWARDS),
        "frac_reward_zero_std": Metric(
            "1",
            "Share of completions in a prompt (or step) whose rewards are all equal.",
            Logs(STEPS, "`reward_weight` above 0", evaluated=False),
        ),
        "pull/mean": Metric(
            "nats",
            "What rewards and completions of the dataset add to the divergence, per token.",
            Logs(WEIGHTED, "rows with a `pull`", evaluated=False),
            "pulled / weight",
        ),
    }

    def __init__(self, rewards: Sequence[Given], weight: float) -> None:
        self._given, self._weight = rewards, weight
        self.needs_rewards = self.in_groups = self.pulls = weight > 0
        self._rewards: Rewards
        self._evaluated: list[Tensor] | None = None
        """[*, F] each, rewards of the evaluation in progress: each row once, in the order of generation."""
        self._texts: dict[str, list[str]] = {}
        """Prompts and completions of these rows, for `log_completions` only."""

    @classmethod
    def of(cls, now: Any) -> BatchRewards | None:
        return cls(now.reward_sources, now.reward_weight) if now.reward_sources or now.reward_weight else None

    @property
    def whole_batch(self) -> bool:
        """Whether training depends on rewards; logged ones may come later."""
        return self.needs_rewards

    def build(self) -> None:
        self._rewards = _built(self._given, self.host)

    def generated(self, batch: Generated) -> None:
        host, tells = self.host, self.host.methods.reads_outcomes
        is_trained = batch.is_training and host.methods.needs_rewards
        is_logged = batch.is_training and host.teaching.logs_rewards
        if not (is_trained or is_logged or self._evaluated is not None or tells):
            return
        # A function that draws random numbers must not change a training that only logs its rewards.
        apart = nullcontext() if is_trained or tells else preserved_rng(host.accelerator.device)
        with host.phase("reward"), apart:
            rewards_BF = self._rewards_of(batch)
            if is_trained or is_logged or tells:
                # From the rewards of all processes, as the completions of a prompt may be in several.
                rewards_RF = host.accelerator.gather(rewards_BF).cpu()
                self._set_rewards(rewards_RF, batch)
            if is_trained:
                self._set_advantages(rewards_RF, batch)
            elif self._evaluated is not None:
                self._evaluated.append(host.gather_distinct_rows(rewards_BF).cpu())
                if host.log_completions:
                    self._keep_texts(batch.tokens, len(self._evaluated[-1]))
            if is_trained or is_logged:
                self._record(rewards_RF)

    def _set_rewards(self, rewards_RF: Tensor, batch: Generated) -> None:
        """Gives each row its reward and, where teachers read them, the completions of its prompt with theirs."""
        host, args = self.host, self.host.args
        totals = _total(rewards_RF, self._rewards.weights).tolist()
        batch.rewards = [None if math.isnan(one) else one for one in totals]
        first = host.accelerator.process_index * len(batch.rows)
        for place, row in enumerate(batch.rows, start=first):
            row.reward = batch.rewards[place]
        if not host.methods.reads_outcomes:
            return
        number = args.num_generations if batch.is_training else args.num_generations_eval or args.num_generations
        texts = texts_of(host.processing_class, Rollout.unpack(batch.tokens).completion_lists())
        everyone = list(zip(gather_object(texts), batch.rewards, strict=True))
        for place, row in enumerate(batch.rows, start=first):
            start = place - place % number
            group = tuple(everyone[start : start + number])
            row.outcome = Outcome(group[place - start][1], place - start, group)

    def _set_advantages(self, rewards_RF: Tensor, batch: Generated) -> None:
        args, rows = self.host.args, batch.rows
        values_R, is_flat_R = advantages(
            rewards_RF,
            self._rewards.weights,
            args.num_generations,
            args.scale_rewards,
            args.multi_objective_aggregation,
        )
        first = self.host.accelerator.process_index * len(rows)
        for row, value in zip(rows, values_R[first : first + len(rows)].tolist(), strict=True):
            row.advantage = value
            row.pull += self._weight * value
        self.host.record("frac_reward_zero_std", float(is_flat_R[batch.counts["asked"] > 0].float().mean()))

    # ---- Calling the functions --------------------------------------------------------------------------------------

    def _rewards_of(self, batch: Generated) -> Tensor:
        """[B, F], on the accelerator's device; NaN for rows that are not the student's, skipped, or padding."""
        rows, conversations = batch.rows, batch.written.conversations
        metrics: dict[str, list[float]] = defaultdict(list)
        numbers = [number for number, row in enumerate(rows) if row.by_student and not row.is_padding]
        of_student = [rows[number] for number in numbers]
        rollout = Rollout.unpack(batch.tokens)
        ids = rollout.completion_lists()
        completions = self._completions_of(rollout, ids, rows) if conversations is None else conversations
        arguments = {
            **self._columns(of_student),
            "completions": [completions[number] for number in numbers],
            "completion_ids": [ids[number] for number in numbers],
            "trainer_state": self.host.state,
            "log_metric": lambda name, value: metrics[name].append(float(value)),
        }
        if (environments := self.host.turns.environments) is not None:
            arguments["environments"] = [environments.current[number] for number in numbers]
        found = torch.full((len(rows), len(self._rewards.functions)), torch.nan)
        found[numbers] = self._rewards.of(arguments, [row.request.where for row in of_student])
        # Means over the calls of `log_metric` in all processes.
        everyone = gather_object([dict(metrics)])
        for name in sorted({name for theirs in everyone for name in theirs}):
            values = [value for theirs in everyone for value in theirs.get(name, ())]
            self.host.record(name, sum(values) / len(values), len(values))
        return found.to(self.host.accelerator.device)

    def _columns(self, rows: Sequence[BatchRow]) -> dict[str, list[Any]]:
        """Columns of the dataset as arguments; copies, since functions may change them."""
        # What environments tell is the teacher's, and not of all rows.
        hidden = {"privileged_context"} if self.host.teaching.readers.intake.is_told else set()
        names = [name for name in (rows[0] if rows else ()) if name not in {*NOT_PASSED, *hidden}]
        columns = {name: [row.get(name) for row in rows] for name in names}
        if self.host.reads_solutions and "privileged_context" in columns:
            columns.setdefault("solution", columns["privileged_context"])  # as the dataset may have called it
        return deepcopy({**columns, "prompts": [row["prompt"] for row in rows]})

    def _completions_of(self, rollout: Rollout, ids: list[list[int]], rows: Sequence[BatchRow]) -> Sequence[Any]:
        """The completions `ids` of a rollout in the form of its prompts, text or messages."""
        processing = self.host.processing_class
        is_text = isinstance(rows[0]["prompt"], str)
        if not is_text and any(getattr(processing, f"response_{name}", None) for name in ("template", "schema")):
            # An empty completion cannot be parsed, so a padding token stands for it.
            pad, prompts = [processing.pad_token_id], rollout.prompt_lists()
            parsed = [parse_response(processing, one or pad, prefix=of) for one, of in zip(ids, prompts, strict=True)]
            return [[message] for message in parsed]
        texts = processing.batch_decode(ids, skip_special_tokens=True)
        return texts if is_text else [[{"role": "assistant", "content": text}] for text in texts]

    # ---- The log ----------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self, prefix: str) -> Iterator[None]:
        """Records the rewards of all rows of an evaluation at its end; with `log_completions` saves them with texts."""
        evaluated = self._evaluated = []
        self._texts = {"prompt": [], "completion": []}
        try:
            yield
        finally:
            self._evaluated = None
        if evaluated:
            rewards_RF = torch.cat(evaluated)
            self._record(rewards_RF)
            if self.host.log_completions and self.host.accelerator.is_main_process:
                self._save_table(rewards_RF, prefix)

    def of_evaluation(self) -> Tensor:
        """[N], the rewards of the rows of the evaluation in progress, NaN for one without any."""
        assert self._evaluated, "an evaluation has begun, and has rows"
        return _total(torch.cat(self._evaluated), self._rewards.weights)

    def _keep_texts(self, tokens: Mapping[str, Any], number: int) -> None:
        """Keeps the texts of a batch with so many distinct rows. Collective."""
        rollout, decode = Rollout.unpack(tokens), self.host.processing_class.batch_decode
        for name, ids in {"prompt": rollout.prompt_lists(), "completion": rollout.completion_lists()}.items():
            texts = gather_object(decode(ids, skip_special_tokens=True))
            self._texts[name] += texts[:number]  # the others pad the last batch

    def _save_table(self, rewards_RF: Tensor, prefix: str) -> None:
        """Writes a table of an evaluation, one line per row, next to those that TRL writes of trainings."""
        folder, step = Path(self.host.args.output_dir or "") / "completions", self.host.state.global_step
        folder.mkdir(parents=True, exist_ok=True)
        columns = dict(zip(self._rewards.functions, rewards_RF.T.tolist(), strict=True))
        DataFrame({"step": step, **self._texts, **columns}).to_parquet(folder / f"{prefix}_{step:05d}.parquet")

    def _record(self, rewards_RF: Tensor) -> None:
        totals_R = _total(rewards_RF, self._rewards.weights)
        for name, values_R in zip(self._rewards.functions, rewards_RF.T, strict=True):
            self.host.record(f"rewards/{name}/mean", float(values_R.nanmean()))
            self.host.record(f"rewards/{name}/std", float(nanstd(values_R)))
        self.host.record("reward", float(totals_R.nanmean()))
        self.host.record("reward_std", float(nanstd(totals_R)))


def _built(rewards: Sequence[Given], trainer: Any) -> Rewards:
    """The functions of all rewards, with their models loaded."""
    args, functions = trainer.args, {}
    for number, one in enumerate(rewards):
        function = one.source
        if one.is_model:
            assert one.tokenizer is not None, "it was loaded with the arguments"
            with whole_checkpoint(f"reward_funcs[{number}]"):
                model = loaded_model(function) if isinstance(function, str) else function
            placed = model if getattr(model, "hf_device_map", None) else model.to(trainer.accelerator.device)
            function = RewardModel(
                placed, one.tokenizer, trainer.chat_template_kwargs, args.per_device_train_batch_size
            )
        functions[one.name] = function
    weights = torch.ones(len(functions))  # those of environments come last, with a weight of 1
    if args.reward_weights:
        weights[: len(args.reward_weights)] = torch.tensor(args.reward_weights, dtype=torch.float32)
    return Rewards(functions=functions, weights=weights)


# ---- Advantages, as TRL's GRPO computes them ------------------------------------------------------------------------


def advantages(
    rewards_RF: Tensor, weights_F: Tensor, number: int, scale: str, aggregation: str
) -> tuple[Tensor, Tensor]:
    """[R], advantages (DeepSeekMath, arXiv 2402.03300; `"normalize_then_sum"`: 2601.05242), 0 without a reward; and
    [R], whether the standard deviation that scales the row, or would with scaling, is 0.
    """
    # The completions of a prompt are adjacent rows; a reward is NaN where its function returned `None`.
    if aggregation == "normalize_then_sum":
        rewards_GnF = rewards_RF.view(-1, number, rewards_RF.size(1))
        differences_GnF = rewards_GnF - rewards_GnF.nanmean(dim=1, keepdim=True)
        scaled_GnF = differences_GnF / (nanstd(rewards_GnF, dim=1, keepdim=True) + _EPSILON)
        # A reward that is alone in its group has no deviation, and adds nothing.
        sums_R = (scaled_GnF.view_as(rewards_RF) * weights_F).nansum(dim=1)
        sums_R = sums_R.masked_fill(rewards_RF.isnan().all(dim=1), torch.nan)
        deviation_R, values_R = nanstd(sums_R).expand_as(sums_R), sums_R - sums_R.nanmean()
    else:
        rewards_R = _total(rewards_RF, weights_F)
        rewards_Gn = rewards_R.view(-1, number)
        if scale == "batch":
            deviation_R = nanstd(rewards_R).expand_as(rewards_R)
        else:
            deviation_R = nanstd(rewards_Gn, dim=1).repeat_interleave(number)
        values_R = (rewards_Gn - rewards_Gn.nanmean(dim=1, keepdim=True)).flatten()
    if aggregation == "normalize_then_sum" or scale != "none":
        values_R = values_R / (deviation_R + _EPSILON)
    return values_R.nan_to_num(nan=0.0), torch.isclose(deviation_R, torch.zeros_like(deviation_R))


def _total(rewards_RF: Tensor, weights_F: Tensor) -> Tensor:
    """[R], the weighted sum of each row's rewards, ignoring NaN; NaN if all are."""
    sums_R = (rewards_RF * weights_F).nansum(dim=1)
    # A sum of nothing would be 0, which is a reward like any other.
    return sums_R.masked_fill(rewards_RF.isnan().all(dim=1), torch.nan)
