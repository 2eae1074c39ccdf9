"""The metrics that the trainer adds to TRL's log: their names, units and meanings, and the means over tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trl_opsd.types.loss import TENTHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; `docs/reference.md` is generated from these."""

    unit: str
    meaning: str
    reduced: str
    """How values are reduced over processes and steps."""
    appears: str
    """The logs that contain it."""
    evaluated: bool = True
    """Whether an evaluation has it too, as `eval_<name>`, `eval_<dataset>_<name>`, or under another prefix."""


_OVER_TOKENS = "weighted mean over the tokens in the loss, of all processes and micro-batches"
_OF_ALL = "over the tokens in the loss, of all processes and micro-batches"
_OF_SOME = "over one in 16 tokens in the loss, of all processes and micro-batches"
_OVER_PROMPTS = "all processes; mean over prompts with at least two completions in the loss, then over steps"
_WITH_GROUPS = "`num_generations` above 1, in evaluations `num_generations_eval`; not where processes share rows"
_IN_WHOLE_ROWS = "always, unless the loss had no tokens; in training not where processes share rows"
_WITH_TEACHERS = "several teachers, of those that had a token in the loss"
_WITH_DATASET = "`lmbda` below 1; not where processes share rows"
_OVER_REWARDED = "all processes; over all rows of an evaluation, or over those of a step and then the mean over steps"
_WITH_REWARDS = "`reward_funcs`, in training with `reward_weight` above 0"
_WITH_A_REWARD = f"{_WITH_REWARDS}; where a function gave one"
_OF_A_PHASE = "main process; mean over optimizer steps, sum over an evaluation"
_OF_A_SYNC = "main process; mean over weight syncs"
_OF_A_STEP = "main process; mean over optimizer steps"
_WITH_OVERLAP = '`overlap="step"` with a rollout that writes apart'
_WITH_TOKENS = "always, unless the loss had no tokens"
_WITH_SYNC = "rollouts with vLLM, after a weight sync"
_WITH_PROOF = "as `sync/seconds`, if `vllm_sync_check` verified the sync"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "divergence/mean": Metric(
            unit="nats",
            meaning="Divergence between teacher and student, per token.",
            reduced=_OVER_TOKENS,
            appears=_WITH_TOKENS,
        ),
        "divergence/clipped": Metric(
            unit="1",
            meaning="Share of the tokens in which at least one entry of the vocabulary was clipped.",
            reduced=_OF_ALL,
            appears="a clip of entries",
        ),
        "divergence/high_entropy": Metric(
            unit="nats",
            meaning="`divergence/mean` of a fifth of each completion's tokens, those of the highest `entropy/student`.",
            reduced=_OVER_TOKENS,
            appears=_IN_WHOLE_ROWS,
        ),
        **{
            f"divergence/position_{tenth}": Metric(
                unit="nats",
                meaning=f"`divergence/mean` of the {ordinal} tenth of each completion.",
                reduced=_OVER_TOKENS,
                appears="as `divergence/high_entropy`, if a token counts there",
            )
            for tenth, ordinal in enumerate(
                ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "last")
            )
        },
        "divergence/teacher/<name>": Metric(
            unit="nats",
            meaning="`divergence/mean` of the rows of the teacher of this name.",
            reduced=_OVER_TOKENS,
            appears=_WITH_TEACHERS,
        ),
        "entropy/student": Metric(
            unit="nats",
            meaning="Entropy of the student's next-token distribution in the loss.",
            reduced=_OVER_TOKENS,
            appears=_WITH_TOKENS,
        ),
        "entropy/teacher": Metric(
            unit="nats",
            meaning="Entropy of the teacher's next-token distribution in the loss.",
            reduced=_OVER_TOKENS,
            appears=_WITH_TOKENS,
        ),
        "agreement/first": Metric(
            unit="1",
            meaning="Share of the tokens where student and teacher find the same token likeliest.",
            reduced=_OF_ALL,
            appears=_WITH_TOKENS,
        ),
        "agreement/sampled": Metric(
            unit="1",
            meaning="Share of the tokens that are the teacher's likeliest.",
            reduced=_OF_ALL,
            appears=_WITH_TOKENS,
        ),
        "agreement/top": Metric(
            unit="1",
            meaning="Share of the 16 likeliest tokens of one model that are among those of the other.",
            reduced=_OF_SOME,
            appears=_WITH_TOKENS,
        ),
        "agreement/top_mass": Metric(
            unit="1",
            meaning="Probability that the student gives to those that are in both.",
            reduced=_OF_SOME,
            appears=_WITH_TOKENS,
        ),
        "pull/mean": Metric(
            unit="nats",
            meaning="What rewards and completions of the dataset add to the divergence, per token.",
            reduced=_OVER_TOKENS,
            appears="rows with a `pull`",
            evaluated=False,
        ),
        "importance/mean": Metric(
            unit="1",
            meaning="Importance weight of a sampled token, after its bound.",
            reduced=_OF_ALL,
            appears='`divergence="sampled_reverse_kl"` with an engine, at temperature 1, without tools',
            evaluated=False,
        ),
        "entropy/teacher/<name>": Metric(
            unit="nats",
            meaning="`entropy/teacher` of the teacher of this name, on its rows.",
            reduced=_OVER_TOKENS,
            appears=_WITH_TEACHERS,
        ),
        "group/divergence_std": Metric(
            unit="nats",
            meaning="How far completions of one prompt are apart: standard deviation of their mean divergence.",
            reduced=_OVER_PROMPTS,
            appears=_WITH_GROUPS,
        ),
        "group/length_std": Metric(
            unit="tokens",
            meaning="The same of their numbers of tokens in the loss.",
            reduced=_OVER_PROMPTS,
            appears=_WITH_GROUPS,
        ),
        "selection/share": Metric(
            unit="1",
            meaning="Share of the tokens that are learned; all other figures of a training are of these.",
            reduced="all processes; mean over optimizer steps",
            appears="`token_selection`; not where processes share rows",
            evaluated=False,
        ),
        "selection/score": Metric(
            unit="nats",
            meaning="Mean over all tokens of what is chosen by: the student's entropy, or the divergence.",
            reduced="all processes; mean over optimizer steps",
            appears="`token_selection` by one of these",
            evaluated=False,
        ),
        "completions/length_drift": Metric(
            unit="1",
            meaning="Mean length of the student's completions, divided by that of the first 10 optimizer steps, or of "
            "those so far.",
            reduced="all processes; mean over optimizer steps",
            appears="always, unless the loss had no tokens, or no completion of the student",
            evaluated=False,
        ),
        "completions/repeated_ratio": Metric(
            unit="1",
            meaning="Share of the student's completions of whose last 32 tokens at most half of the 4-grams differ.",
            reduced="all processes; mean over generation batches",
            appears="always, unless all completions are from elsewhere (`lmbda`)",
        ),
        "off_policy/share": Metric(
            unit="1",
            meaning="Share of rows whose completion the student has not written, of those with a token in the loss.",
            reduced="all processes; mean over optimizer steps",
            appears=_WITH_DATASET,
            evaluated=False,
        ),
        "off_policy/divergence": Metric(
            unit="nats",
            meaning="`divergence/mean` of those rows.",
            reduced="all processes; mean over the optimizer steps that had some",
            appears=_WITH_DATASET,
            evaluated=False,
        ),
        "on_policy/divergence": Metric(
            unit="nats",
            meaning="`divergence/mean` of the rows that the student has completed.",
            reduced="all processes; mean over the optimizer steps that had some",
            appears=_WITH_DATASET,
            evaluated=False,
        ),
        "rewards/<name>/mean": Metric(
            unit="of the function",
            meaning="Mean reward by the function of that name; without rows for which it returned `None`.",
            reduced=_OVER_REWARDED,
            appears=_WITH_A_REWARD,
        ),
        "rewards/<name>/std": Metric(
            unit="of the function",
            meaning="The standard deviation of the same rewards.",
            reduced=_OVER_REWARDED,
            appears=_WITH_A_REWARD,
        ),
        "reward": Metric(
            unit="of the functions",
            meaning="Mean sum of the rewards of a completion, each times its number in `reward_weights`.",
            reduced=_OVER_REWARDED,
            appears=_WITH_A_REWARD,
        ),
        "reward_std": Metric(
            unit="of the functions",
            meaning="The standard deviation of the same sums.",
            reduced=_OVER_REWARDED,
            appears=_WITH_A_REWARD,
        ),
        "frac_reward_zero_std": Metric(
            unit="1",
            meaning="Share of completions whose rewards have the standard deviation 0 in their prompt, or step.",
            reduced="all processes; mean over optimizer steps",
            appears="`reward_weight` above 0",
            evaluated=False,
        ),
        "time/complete": Metric(
            unit="seconds",
            meaning="Generating completions, without `time/sync`; with `overlap`, waiting for them.",
            reduced=_OF_A_PHASE,
            appears=_WITH_TOKENS,
        ),
        "time/sync": Metric(
            unit="seconds",
            meaning="Sending the student's weights to vLLM, and verifying that they arrived.",
            reduced=_OF_A_PHASE,
            appears=_WITH_SYNC,
        ),
        "time/reward": Metric(
            unit="seconds",
            meaning="Calling reward functions and models, and waiting for those of other processes.",
            reduced=_OF_A_PHASE,
            appears=_WITH_REWARDS,
        ),
        "time/teach": Metric(
            unit="seconds",
            meaning="The teacher's forward passes over prompts and completions, or waiting for its server.",
            reduced=_OF_A_PHASE,
            appears=_WITH_TOKENS,
        ),
        "time/compare": Metric(
            unit="seconds",
            meaning="Forward pass of the student, loss and backward pass; under DeepSpeed also the optimizer step.",
            reduced=_OF_A_PHASE,
            appears=_WITH_TOKENS,
        ),
        "time/save": Metric(
            unit="seconds",
            meaning="Writing a checkpoint.",
            reduced=_OF_A_PHASE,
            appears="the first log after a checkpoint",
            evaluated=False,
        ),
        "tokens_per_second": Metric(
            unit="tokens per second",
            meaning="Tokens in the loss, divided by the seconds of all phases but `save`.",
            reduced="tokens of all processes, seconds of the main process",
            appears=_WITH_TOKENS,
        ),
        "overlap/first_backward": Metric(
            unit="seconds",
            meaning="From the begin of a step until its first micro-batch was learned, by the host's clock.",
            reduced=_OF_A_STEP,
            appears=_WITH_OVERLAP,
            evaluated=False,
        ),
        "overlap/last_row": Metric(
            unit="seconds",
            meaning="From the begin of a step until its last row was written.",
            reduced=_OF_A_STEP,
            appears=_WITH_OVERLAP,
            evaluated=False,
        ),
        "overlap/end": Metric(
            unit="seconds",
            meaning="From the begin of a step until its last micro-batch was learned.",
            reduced=_OF_A_STEP,
            appears=_WITH_OVERLAP,
            evaluated=False,
        ),
        "overlap/staleness": Metric(
            unit="1",
            meaning="Share of steps that learned rows which were written before the step before.",
            reduced=_OF_A_STEP,
            appears='`overlap="ahead"`',
            evaluated=False,
        ),
        "overlap/divergence": Metric(
            unit="nats per token",
            meaning="How far the step before has moved the student, from its distribution before that step.",
            reduced="all processes; mean over optimizer steps",
            appears='`overlap="ahead"`, where rows were written before that step',
            evaluated=False,
        ),
        "sync/seconds": Metric(
            unit="seconds",
            meaning="Sending the student's weights to vLLM, without the verification.",
            reduced=_OF_A_SYNC,
            appears=_WITH_SYNC,
        ),
        "sync/bytes": Metric(
            unit="bytes",
            meaning="Size of the tensors sent to the process's own engine, or to the server.",
            reduced=_OF_A_SYNC,
            appears=_WITH_SYNC,
        ),
        "sync/proof_seconds": Metric(
            unit="seconds",
            meaning="Verifying a weight sync.",
            reduced=_OF_A_SYNC,
            appears=_WITH_PROOF,
        ),
        "rollout/logprob_gap": Metric(
            unit="nats",
            meaning="Largest difference between a log-probability of vLLM and the student's, in that verification.",
            reduced="maximum over processes; mean over weight syncs",
            appears=_WITH_PROOF,
        ),
        "nonfinite/skipped_steps": Metric(
            unit="optimizer steps",
            meaning="Steps skipped because of a loss or gradient that is NaN or infinite.",
            reduced="the same in all processes; total since `train` was called",
            appears='every log of a loss with `nonfinite="skip"`; otherwise once a float16 loss scale skipped a step',
            evaluated=False,
        ),
    }
)
"""By their names in the training log."""


def evaluated_names(datasets: Any, rewards: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """Names that evaluations log whenever there is a value, and prefixes of others; several `datasets` are named."""
    starts = [f"eval_{name}_" for name in datasets] if isinstance(datasets, Mapping) else ["eval_"]
    of_rewards = [f"rewards/{name}/{what}" for name in rewards for what in ("mean", "std")]
    logged = (name for name, one in METRICS.items() if one.evaluated and (rewards or not name.startswith("reward")))
    names = ("loss", "entropy", *of_rewards, *logged)
    of_any_name = ("completions/", "divergence/teacher/", "entropy/teacher/")
    known = [start + name for start in starts for name in names]
    return known, tuple(start + one for start in starts for one in of_any_name)


def token_metrics(totals: Mapping[str, float], seconds: Mapping[str, float], steps: float) -> dict[str, float]:
    """Means over tokens, whose weight is not 0, seconds of phases divided by `steps`, and tokens per second."""
    weight = totals["weight"]
    return {
        "divergence/mean": totals["divergence"] / weight,
        "entropy/student": totals["student_entropy"] / weight,
        "entropy/teacher": totals["teacher_entropy"] / weight,
        **({"pull/mean": totals["pulled"] / weight} if "pulled" in totals else {}),
        **{name: totals[of] / totals["tokens"] for name, of in _SHARES.items() if of in totals},
        **{name: totals[of] / totals["ranked"] for name, of in _OF_RANKS.items() if totals.get("ranked")},
        **_by_place(totals),
        **_by_teacher(totals),
        **{f"time/{phase}": spent / steps for phase, spent in seconds.items()},
        # Sums of all processes by the seconds of this one, which waits for the others in each phase.
        "tokens_per_second": totals["tokens"] / max(sum(seconds.values()) - seconds.get("save", 0.0), 1e-9),
    }


_OF_LOSS = ("divergence/", "entropy/", "agreement/", "pull/", "importance/", "time/", "tokens")
_SHARES = {
    "divergence/clipped": "clipped",
    "agreement/first": "same_first",
    "agreement/sampled": "teacher_first",
    "importance/mean": "importance",
}
"""Means over tokens without weights, and their sums in [`LossParts.ROW_NAMES`]."""
_OF_RANKS = {"agreement/top": "top_shared", "agreement/top_mass": "top_mass"}
"""The same over the tokens whose likeliest tokens were compared."""


def _by_place(totals: Mapping[str, float]) -> dict[str, float]:
    """Means of the divergence over parts of completions that have a weight."""
    names = {f"position_{tenth}": (f"weight_{tenth}", f"divergence_{tenth}") for tenth in range(TENTHS)}
    names["high_entropy"] = ("high_entropy_weight", "high_entropy_divergence")
    return {
        f"divergence/{name}": totals[sum_] / totals[weight] for name, (weight, sum_) in names.items() if totals[weight]
    }


def _by_teacher(totals: Mapping[str, float]) -> dict[str, float]:
    """The same over the rows of each of several teachers, and its entropy."""
    weights = {key.removeprefix("weight/"): value for key, value in totals.items() if key.startswith("weight/")}
    return {
        f"{logged}/teacher/{name}": totals[f"{summed}/{name}"] / weight
        for name, weight in weights.items()
        if weight
        for logged, summed in (("divergence", "divergence"), ("entropy", "teacher_entropy"))
    }


_TAKEN = {
    *("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"),
    *(name for name in METRICS if name.startswith(_OF_LOSS)),
}
"""Names that are logged elsewhere, which would overwrite a recorded number or be overwritten."""


def recorded(name: str, value: Any) -> float:
    """A number to log under a name; `ValueError` if it is not one number or the name is taken."""
    if name in _TAKEN:
        raise ValueError(f"`record({name!r}, ...)`: something else is logged under that name, so choose another.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`record({name!r}, {value!r})`: expected one number.") from error
