"""The metrics that the trainer adds to TRL's log: their names, units and meanings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
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
    mean_of: tuple[str, str] | None = None
    """Of a mean over tokens: the statistics of [`LossParts.ROW_NAMES`] that are summed and divided; with several
    teachers, `divergence/<name>` is the sum over the rows of one."""


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
_WITH_OVERLAP = '`overlap="step"` with a rollout that generates in another process'
_WITH_TOKENS = "always, unless the loss had no tokens"
_WITH_SYNC = "rollouts with vLLM, after a weight sync"
_WITH_PROOF = "as `sync/seconds`, if `vllm_sync_check` verified the sync"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "divergence/mean": Metric(
            "nats",
            "Divergence between teacher and student, per token.",
            _OVER_TOKENS,
            _WITH_TOKENS,
            mean_of=("divergence", "weight"),
        ),
        "divergence/clipped": Metric(
            "1",
            "Share of the tokens in which at least one entry of the vocabulary was clipped.",
            _OF_ALL,
            "a clip of entries",
            mean_of=("clipped", "tokens"),
        ),
        "divergence/high_entropy": Metric(
            "nats",
            "`divergence/mean` of a fifth of each completion's tokens, those of the highest `entropy/student`.",
            _OVER_TOKENS,
            _IN_WHOLE_ROWS,
            mean_of=("high_entropy_divergence", "high_entropy_weight"),
        ),
        **{
            f"divergence/position_{tenth}": Metric(
                "nats",
                f"`divergence/mean` of the {ordinal} tenth of each completion.",
                _OVER_TOKENS,
                "as `divergence/high_entropy`, if a token counts there",
                mean_of=(f"divergence_{tenth}", f"weight_{tenth}"),
            )
            for tenth, ordinal in enumerate(
                ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "last")
            )
        },
        "divergence/teacher/<name>": Metric(
            "nats",
            "`divergence/mean` of the rows of the teacher of this name.",
            _OVER_TOKENS,
            _WITH_TEACHERS,
            mean_of=("divergence/<name>", "weight/<name>"),
        ),
        "entropy/student": Metric(
            "nats",
            "Entropy of the student's next-token distribution in the loss.",
            _OVER_TOKENS,
            _WITH_TOKENS,
            mean_of=("student_entropy", "weight"),
        ),
        "entropy/teacher": Metric(
            "nats",
            "Entropy of the teacher's next-token distribution in the loss.",
            _OVER_TOKENS,
            _WITH_TOKENS,
            mean_of=("teacher_entropy", "weight"),
        ),
        "agreement/first": Metric(
            "1",
            "Share of the tokens where student and teacher have the same most likely token.",
            _OF_ALL,
            _WITH_TOKENS,
            mean_of=("same_first", "tokens"),
        ),
        "agreement/sampled": Metric(
            "1",
            "Share of the tokens that are the teacher's most likely ones.",
            _OF_ALL,
            _WITH_TOKENS,
            mean_of=("teacher_first", "tokens"),
        ),
        "agreement/top": Metric(
            "1",
            "Overlap of both models' 16 most likely tokens, as a share of them.",
            _OF_SOME,
            _WITH_TOKENS,
            mean_of=("top_shared", "ranked"),
        ),
        "agreement/top_mass": Metric(
            "1",
            "Probability that the student gives to those that are in both.",
            _OF_SOME,
            _WITH_TOKENS,
            mean_of=("top_mass", "ranked"),
        ),
        "pull/mean": Metric(
            "nats",
            "What rewards and completions of the dataset add to the divergence, per token.",
            _OVER_TOKENS,
            "rows with a `pull`",
            evaluated=False,
            mean_of=("pulled", "weight"),
        ),
        "importance/mean": Metric(
            "1",
            "Importance weight of a sampled token, after its bound.",
            _OF_ALL,
            '`divergence="sampled_reverse_kl"` with an engine, at temperature 1, without tools',
            evaluated=False,
            mean_of=("importance", "tokens"),
        ),
        "entropy/teacher/<name>": Metric(
            "nats",
            "`entropy/teacher` of the teacher of this name, on its rows.",
            _OVER_TOKENS,
            _WITH_TEACHERS,
            mean_of=("teacher_entropy/<name>", "weight/<name>"),
        ),
        "group/divergence_std": Metric(
            "nats",
            "How far completions of one prompt are apart: standard deviation of their mean divergence.",
            _OVER_PROMPTS,
            _WITH_GROUPS,
        ),
        "group/length_std": Metric(
            "tokens", "The same of their numbers of tokens in the loss.", _OVER_PROMPTS, _WITH_GROUPS
        ),
        "selection/share": Metric(
            "1",
            "Share of the tokens that are trained on; all other figures of a training are of these.",
            "all processes; mean over optimizer steps",
            "`token_selection`; not where processes share rows",
            evaluated=False,
        ),
        "selection/score": Metric(
            "nats",
            "Mean over all tokens of the score they are selected by: the student's entropy, or the divergence.",
            "all processes; mean over optimizer steps",
            "`token_selection` by one of these",
            evaluated=False,
        ),
        "completions/length_drift": Metric(
            "1",
            "Mean length of the student's completions, divided by that of the first 10 optimizer steps, or of "
            "those so far.",
            "all processes; mean over optimizer steps",
            "always, unless the loss had no tokens, or no completion of the student",
            evaluated=False,
        ),
        "completions/repeated_ratio": Metric(
            "1",
            "Share of the student's completions of whose last 32 tokens at most half of the 4-grams differ.",
            "all processes; mean over generation batches",
            "always, unless all completions are from elsewhere (`lmbda`)",
        ),
        "off_policy/share": Metric(
            "1",
            "Share of rows whose completion the student did not generate, of those with a token in the loss.",
            "all processes; mean over optimizer steps",
            _WITH_DATASET,
            evaluated=False,
        ),
        "off_policy/divergence": Metric(
            "nats",
            "`divergence/mean` of those rows.",
            "all processes; mean over the optimizer steps that had some",
            _WITH_DATASET,
            evaluated=False,
        ),
        "on_policy/divergence": Metric(
            "nats",
            "`divergence/mean` of the rows whose completion the student generated.",
            "all processes; mean over the optimizer steps that had some",
            _WITH_DATASET,
            evaluated=False,
        ),
        "rewards/<name>/mean": Metric(
            "of the function",
            "Mean reward by the function of that name; without rows for which it returned `None`.",
            _OVER_REWARDED,
            _WITH_A_REWARD,
        ),
        "rewards/<name>/std": Metric(
            "of the function", "The standard deviation of the same rewards.", _OVER_REWARDED, _WITH_A_REWARD
        ),
        "reward": Metric(
            "of the functions",
            "Mean sum of the rewards of a completion, each times its number in `reward_weights`.",
            _OVER_REWARDED,
            _WITH_A_REWARD,
        ),
        "reward_std": Metric(
            "of the functions", "The standard deviation of the same sums.", _OVER_REWARDED, _WITH_A_REWARD
        ),
        "frac_reward_zero_std": Metric(
            "1",
            "Share of completions whose rewards have the standard deviation 0 in their prompt, or step.",
            "all processes; mean over optimizer steps",
            "`reward_weight` above 0",
            evaluated=False,
        ),
        "time/complete": Metric(
            "seconds",
            "Generating completions, without `time/sync`; with `overlap`, waiting for them.",
            _OF_A_PHASE,
            _WITH_TOKENS,
        ),
        "time/sync": Metric(
            "seconds",
            "Sending the student's weights to vLLM, and verifying that they arrived.",
            _OF_A_PHASE,
            _WITH_SYNC,
        ),
        "time/reward": Metric(
            "seconds",
            "Calling reward functions and models, and waiting for those of other processes.",
            _OF_A_PHASE,
            _WITH_REWARDS,
        ),
        "time/teach": Metric(
            "seconds",
            "The teacher's forward passes over prompts and completions, or waiting for its server.",
            _OF_A_PHASE,
            _WITH_TOKENS,
        ),
        "time/compare": Metric(
            "seconds",
            "Forward pass of the student, loss and backward pass; under DeepSpeed also the optimizer step.",
            _OF_A_PHASE,
            _WITH_TOKENS,
        ),
        "time/save": Metric(
            "seconds", "Writing a checkpoint.", _OF_A_PHASE, "the first log after a checkpoint", evaluated=False
        ),
        "tokens_per_second": Metric(
            "tokens per second",
            "Tokens in the loss, divided by the seconds of all phases but `save`.",
            "tokens of all processes, seconds of the main process",
            _WITH_TOKENS,
        ),
        "overlap/first_backward": Metric(
            "seconds",
            "From the start of a step until its first micro-batch was trained on, by the host's clock.",
            _OF_A_STEP,
            _WITH_OVERLAP,
            evaluated=False,
        ),
        "overlap/last_row": Metric(
            "seconds",
            "From the start of a step until its last row was generated.",
            _OF_A_STEP,
            _WITH_OVERLAP,
            evaluated=False,
        ),
        "overlap/end": Metric(
            "seconds",
            "From the start of a step until its last micro-batch was trained on.",
            _OF_A_STEP,
            _WITH_OVERLAP,
            evaluated=False,
        ),
        "overlap/staleness": Metric(
            "1",
            "Share of steps that trained on rows generated before the previous step.",
            _OF_A_STEP,
            '`overlap="ahead"`',
            evaluated=False,
        ),
        "overlap/divergence": Metric(
            "nats per token",
            "How far the previous step has moved the student, from its distribution before that step.",
            "all processes; mean over optimizer steps",
            '`overlap="ahead"`, where rows were generated before that step',
            evaluated=False,
        ),
        "sync/seconds": Metric(
            "seconds", "Sending the student's weights to vLLM, without the verification.", _OF_A_SYNC, _WITH_SYNC
        ),
        "sync/bytes": Metric(
            "bytes", "Size of the tensors sent to the process's own engine, or to the server.", _OF_A_SYNC, _WITH_SYNC
        ),
        "sync/proof_seconds": Metric("seconds", "Verifying a weight sync.", _OF_A_SYNC, _WITH_PROOF),
        "rollout/logprob_gap": Metric(
            "nats",
            "Largest difference between a log-probability of vLLM and the student's, in that verification.",
            "maximum over processes; mean over weight syncs",
            _WITH_PROOF,
        ),
        "nonfinite/skipped_steps": Metric(
            "optimizer steps",
            "Steps skipped because of a loss or gradient that is NaN or infinite.",
            "the same in all processes; total since `train` was called",
            'every log of a loss with `nonfinite="skip"`; otherwise once a float16 loss scale skipped a step',
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


_OF_LOSS = ("divergence/", "entropy/", "agreement/", "pull/", "importance/", "time/", "tokens")
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
