"""Rewards completions, and has rewards decide what is learned: an advantage, which rows count, what teachers read.

B rows of this process · R rows of all · F reward functions · G prompts · n completions of each
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from accelerate.utils import gather_object
from pandas import DataFrame
from torch import Tensor

from trl_opsd._compat.trl import nanstd, parse_response
from trl_opsd._compat.values import Finite, NotNegative
from trl_opsd._compat.versions import replaced
from trl_opsd.data.prompts import SUCCESS_TEMPLATE
from trl_opsd.environments import Environments
from trl_opsd.losses.divergence import describe
from trl_opsd.methods.base import Generated, Method
from trl_opsd.methods.reward_functions import (
    NOT_PASSED,
    Functions,
    Given,
    RewardModel,
    check_columns,
    given_rewards,
    placed_model,
)
from trl_opsd.methods.rows import BatchRow, Outcome, after, reads_outcome, texts_of
from trl_opsd.parallel.rng import preserved_rng
from trl_opsd.types import Rollout
from trl_opsd.types.metrics import BATCHES, STEPS, WEIGHTED, WITH_REWARDS, Logs, Metric

_EPSILON = 1e-4
"""Added to each standard deviation before a division, as in TRL."""
_REWARDS = Logs(
    "all processes; over all rows of an evaluation, or over those of a step and then the mean over steps",
    f"{WITH_REWARDS}; where a function gave one",
)


@final
@dataclass
class Rewards(Method):
    """Calls reward functions and models, and environments that reward, and logs their rewards; at a `weight` of 0,
    without `gate` and `context`, nothing else changes. A trainer with environments has one by default.

    Args:
        functions (`Callable`, [`~transformers.PreTrainedModel`], `str`, or a list of them, *optional*): As TRL's
            `GRPOTrainer` takes them; a name is `"module.function"`, that of a function in `trl.rewards`, or the path of
            a reward model.
        weight (`float`, *optional*, defaults to 0): Weight of the policy gradient of rewards beside the divergence.
        weights (`list[float]`, *optional*): Weight of each function in their sum. When `None`, each has 1, as those of
            environments always have.
        scale (`str`, *optional*, defaults to `"group"`): Standard deviation that divides the rewards: of the prompt's
            rewards (`"group"`), of the step's (`"batch"`), or `"none"`.
        aggregation (`str`, *optional*, defaults to `"sum_then_normalize"`): Whether the sum of several rewards is
            scaled, or each before they are added (`"normalize_then_sum"`).
        gate (`float` or `str`, *optional*): In training, which completions of the student count in the loss: those with
            a reward of at least this number, or all, weighted by `"reward"` or by `"advantage"` where these are above 0
            (arXiv 2605.06188).
        context (`str`, *optional*): `"group_success"` shows the teacher another completion of the same prompt with a
            reward of at least `threshold` (SDPO, arXiv 2601.20802); a row without one, and without context in the
            columns, has no loss.
        threshold (`float`, *optional*, defaults to 1): Minimum reward of a completion that is shown to the teacher.
        tokenizers (`list`, *optional*): The tokenizers of reward models, `None` for a function. When `None`, those at
            the models' paths.
    """

    functions: Any = ()
    weight: NotNegative = 0.0
    weights: list[Finite] | None = None
    scale: Literal["group", "batch", "none"] = "group"
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    gate: Finite | Literal["reward", "advantage"] | None = None
    context: Literal["group_success"] | None = None
    threshold: Finite = 1.0
    tokenizers: Any = None

    whole_rows = False
    metrics: ClassVar = {
        "rewards/<name>/mean": Metric("of the function", "Mean of this function's rewards, without `None`.", _REWARDS),
        "rewards/<name>/std": Metric("of the function", "Standard deviation of this function's rewards.", _REWARDS),
        "reward": Metric("of the functions", "Sum of a completion's rewards times their `weights`.", _REWARDS),
        "reward_std": Metric("of the functions", "Standard deviation of `reward`.", _REWARDS),
        "frac_reward_zero_std": Metric(
            "1",
            "Share of completions whose group has equal rewards: the prompt, or by `scale` the step.",
            Logs(STEPS, "a method that needs rewards", evaluated=False),
        ),
        "nll/mean": Metric(
            "nats",
            "Policy gradient of rewards plus `-log p` of `off_policy`, added to the divergence, per token.",
            Logs(WEIGHTED, "a `weight` of `rewards`, or an `nll_weight`", evaluated=False),
            "nll / weight",
        ),
        "gate/mean": Metric(
            "1",
            "Weight of a row by its reward (`gate`); 0 where the teacher has no context of its own.",
            Logs(BATCHES, "`gate` or `context` of `rewards`, or a `teacher_prompt_fn` that takes rewards"),
        ),
    }

    # ---- Before anything is loaded ----------------------------------------------------------------------------------

    @property
    def whole_batch(self) -> bool:
        """Whether training depends on rewards; logged ones may come later."""
        return self.needs_rewards

    def has(self, hook: str) -> bool:
        return super().has(hook) and (hook != "teacher_prompt" or self.context is not None)

    def find(self, environments: Environments | None) -> None:
        """Finds the functions and those of environments, in `given`, and what is done with their rewards."""
        shows, self.adds_nll = self.context is not None, self.weight > 0
        self.reads_outcomes = self.falls_back = shows
        self.needs_rewards = self.adds_nll or shows or self.gate is not None
        self.in_groups = self.adds_nll or shows or self.gate == "advantage"
        own = given_rewards(self.functions, self.tokenizers)
        if self.weights is not None and len(self.weights) != len(own):
            numbers = f"{len(self.weights)} numbers, but there are {len(own)} `functions`"
            raise ValueError(f"`Rewards(weights=...)` has {numbers}.")
        of_environments = {} if environments is None else environments.rewards([one.name for one in own])
        self.given = [*own, *(Given(name, source) for name, source in of_environments.items())]

    def check_rows(
        self, columns: Mapping[str, Collection[str] | None], more: Collection[str], is_learned: bool
    ) -> None:
        """Checks that functions can be called for the columns of each dataset, `None` where they are not known.

        Rows of a training that does not depend on rewards may lack some: it logs none then.
        """
        self.resumed, self.logs_in_training = is_learned, "train_dataset" in columns
        for where, names in columns.items():
            try:
                check_columns(self.given, where, names or (), more) if names is not None else None
            except ValueError:
                if is_learned or where != "train_dataset":
                    raise
                self.logs_in_training = False

    @property
    def names(self) -> list[str]:
        """Names of the functions and models, in the log."""
        return [one.name for one in self.given]

    def described(self) -> str:
        return describe(replace(self, functions=self.names, tokenizers=None))

    def build(self) -> None:
        host, functions = self.host, {}
        for number, one in enumerate(self.given):
            functions[one.name] = one.source
            if one.is_model:
                assert one.tokenizer is not None, "it was loaded with the arguments"
                model = placed_model(one.source, f"Rewards.functions[{number}]", host.accelerator.device)
                rows = host.args.per_device_train_batch_size
                functions[one.name] = RewardModel(model, one.tokenizer, host.chat_template_kwargs, rows)
        self._functions = Functions(functions)
        self._weights = torch.ones(len(functions))  # those of environments come last
        if self.weights:
            self._weights[: len(self.weights)] = torch.tensor(self.weights, dtype=torch.float32)
        self._evaluated: list[Tensor] | None = None
        """[*, F] each, rewards of the evaluation in progress: each row once, in the order of generation."""
        self._texts: dict[str, list[str]] = {}
        """Prompts and completions of these rows, for `log_completions` only."""

    # ---- A generation batch -----------------------------------------------------------------------------------------

    def generated(self, batch: Generated) -> None:
        host, tells = self.host, self.host.methods.any("reads_outcomes")
        is_trained = batch.is_training and host.methods.any("needs_rewards")
        is_logged = batch.is_training and self.logs_in_training
        if not self.given or not (is_trained or is_logged or self._evaluated is not None or tells):
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
                    self._keep_texts(batch.rollout, len(self._evaluated[-1]))
            if is_trained or is_logged:
                self._record(rewards_RF)
        if self.gate is not None and batch.is_training:
            for row in batch.rows:
                if row.by_student:
                    row.gate *= gate(self.gate, row.reward, row.advantage)

    def _set_rewards(self, rewards_RF: Tensor, batch: Generated) -> None:
        """Gives each row its reward and, where teachers read them, the completions of its prompt with theirs."""
        host, args = self.host, self.host.args
        totals = _total(rewards_RF, self._weights).tolist()
        batch.rewards = [None if math.isnan(one) else one for one in totals]
        first = host.accelerator.process_index * len(batch.rows)
        for place, row in enumerate(batch.rows, start=first):
            row.reward = batch.rewards[place]
        if not host.methods.any("reads_outcomes"):
            return
        number = args.num_generations if batch.is_training else args.num_generations_eval or args.num_generations
        texts = texts_of(host.processing_class, batch.rollout.completion_lists())
        everyone = list(zip(gather_object(texts), batch.rewards, strict=True))
        for place, row in enumerate(batch.rows, start=first):
            start = place - place % number
            group = tuple(everyone[start : start + number])
            row.outcome = Outcome(group[place - start][1], place - start, group)

    def _set_advantages(self, rewards_RF: Tensor, batch: Generated) -> None:
        rows, number = batch.rows, self.host.args.num_generations
        values_R, is_flat_R = advantages(rewards_RF, self._weights, number, self.scale, self.aggregation)
        first = self.host.accelerator.process_index * len(rows)
        for row, value in zip(rows, values_R[first : first + len(rows)].tolist(), strict=True):
            row.advantage = value
            row.nll_weight += self.weight * value
        self.host.record("frac_reward_zero_std", float(is_flat_R[batch.counts["asked"] > 0].float().mean()))

    def teacher_prompt(self, row: BatchRow, completion_text: str, prompt: Any) -> Any:
        request, outcome = row.request, row.outcome
        solution = None if outcome is None else outcome.success(self.threshold)
        if solution is None:
            return prompt if request.tells_more else None
        intake = self.host.teaching.readers.intake
        return intake.with_context(request["prompt"], solution, request.where, SUCCESS_TEMPLATE)

    # ---- Calling the functions --------------------------------------------------------------------------------------

    def _rewards_of(self, batch: Generated) -> Tensor:
        """[B, F], on the accelerator's device; NaN for rows that are not the student's, skipped, or padding."""
        rows, conversations = batch.rows, batch.written.conversations
        metrics: dict[str, list[float]] = defaultdict(list)
        numbers = [number for number, row in enumerate(rows) if row.by_student and not row.is_padding]
        of_student = [rows[number] for number in numbers]
        rollout = batch.rollout
        ids = rollout.completion_lists()
        completions = self._completions_of(rollout, ids, rows) if conversations is None else conversations
        arguments = {
            **self._columns(of_student),
            "completions": [completions[number] for number in numbers],
            "completion_ids": [ids[number] for number in numbers],
            "trainer_state": self.host.state,
            "log_metric": lambda name, value: metrics[name].append(float(value)),
        }
        if (environments := self.host.environments) is not None:
            arguments["environments"] = [environments[number] for number in numbers]
        found = torch.full((len(rows), len(self._functions.functions)), torch.nan)
        found[numbers] = self._functions.of(arguments, [row.request.where for row in of_student])
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
        if isinstance(rows[0]["prompt"], str):
            texts: list[str] = processing.batch_decode(ids, skip_special_tokens=True)
            return texts
        ids = [one[len(row.given.ids) :] for one, row in zip(ids, rows, strict=True)]
        if any(getattr(processing, f"response_{name}", None) for name in ("template", "schema")):
            # An empty completion cannot be parsed, so a padding token stands for it.
            pad, prompts = [processing.pad_token_id], rollout.prompt_lists()
            contexts = [of + row.given.ids for of, row in zip(prompts, rows, strict=True)]
            said = [parse_response(processing, one or pad, prefix=of) for one, of in zip(ids, contexts, strict=True)]
        else:
            texts = processing.batch_decode(ids, skip_special_tokens=True)
            said = [{"role": "assistant", "content": text} for text in texts]
        return [after(row.given, [one]) for row, one in zip(rows, said, strict=True)]

    # ---- The log ----------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluation(self, prefix: str) -> Iterator[None]:
        """Records the rewards of all rows of an evaluation at its end; with `log_completions` saves them with texts."""
        evaluated = list[Tensor]()
        self._texts = {"prompt": [], "completion": []}
        with replaced(self, _evaluated=evaluated):
            yield
        if evaluated:
            rewards_RF = torch.cat(evaluated)
            self._record(rewards_RF)
            if self.host.log_completions and self.host.accelerator.is_main_process:
                self._save_table(rewards_RF, prefix)

    def of_evaluation(self) -> Tensor:
        """[N], the rewards of the rows of the evaluation in progress, NaN for one without any."""
        assert self._evaluated, "an evaluation has begun, and has rows"
        return _total(torch.cat(self._evaluated), self._weights)

    def _keep_texts(self, rollout: Rollout, number: int) -> None:
        """Keeps the texts of a batch with so many distinct rows. Collective."""
        decode = self.host.processing_class.batch_decode
        for name, ids in {"prompt": rollout.prompt_lists(), "completion": rollout.completion_lists()}.items():
            texts = gather_object(decode(ids, skip_special_tokens=True))
            self._texts[name] += texts[:number]  # the others pad the last batch

    def _save_table(self, rewards_RF: Tensor, prefix: str) -> None:
        """Writes a table of an evaluation, one line per row, next to those that TRL writes of trainings."""
        folder, step = Path(self.host.args.output_dir or "") / "completions", self.host.state.global_step
        folder.mkdir(parents=True, exist_ok=True)
        columns = dict(zip(self._functions.functions, rewards_RF.T.tolist(), strict=True))
        DataFrame({"step": step, **self._texts, **columns}).to_parquet(folder / f"{prefix}_{step:05d}.parquet")

    def _record(self, rewards_RF: Tensor) -> None:
        totals_R = _total(rewards_RF, self._weights)
        for name, values_R in zip(self._functions.functions, rewards_RF.T, strict=True):
            self.host.record(f"rewards/{name}/mean", float(values_R.nanmean()))
            self.host.record(f"rewards/{name}/std", float(nanstd(values_R)))
        self.host.record("reward", float(totals_R.nanmean()))
        self.host.record("reward_std", float(nanstd(totals_R)))


def gate(kind: float | str, reward: float | None, advantage: float) -> float:
    """The weight of a completion in the loss by its reward, `None` where it has none: `Rewards.gate`."""
    if reward is None or math.isnan(reward):
        return 0.0
    if isinstance(kind, str):
        return max(0.0, {"reward": reward, "advantage": advantage}[kind])
    return float(reward >= kind)


@final
@dataclass
class PromptFunction(Method):
    """Has a function of the user make the teacher's prompt of a row and its completion: `teacher_prompt_fn`."""

    function: Any

    whole_rows = resumed = False  # a fingerprint has its name among those of functions

    def __post_init__(self) -> None:
        self.reads_outcomes = self.needs_rewards = reads_outcome(self.function)

    def teacher_prompt(self, row: BatchRow, completion_text: str, prompt: Any) -> Any:
        request = row.request
        try:
            found = self.function(dict(request), completion_text, *([row.outcome] if self.reads_outcomes else ()))
        except Exception as error:
            which = f"{request.where}, which has the columns {sorted(request)}"
            error.add_note(f"`teacher_prompt_fn` raised this for {which}.")
            raise
        intake = self.host.teaching.readers.intake
        if found is None and self.reads_outcomes:
            return None
        return intake.prompt_of(request, found, f"What `teacher_prompt_fn` returned for {request.where}")


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
