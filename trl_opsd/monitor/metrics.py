"""The metrics that the trainer adds to TRL's log: their names, units and meanings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Logs:
    """How and where metrics are logged."""

    reduced: str
    """How values are reduced over processes and steps."""
    appears: str
    """The logs that contain them."""
    evaluated: bool = True
    """Whether evaluations have them too, as `eval_<name>`, `eval_<dataset>_<name>`, or under another prefix."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `docs/reference.md` is generated from these."""

    unit: str
    meaning: str
    logs: Logs
    mean_of: str = ""
    """Of a mean over tokens: the statistics of [`LossParts.ROW_NAMES`] whose sums are divided; with several teachers,
    `divergence/<name>` is the sum over the rows of one."""


class Mean(float):
    """A mean of so many values."""

    count: float = 1.0


_WEIGHTED = "weighted mean over the tokens in the loss, of all processes and micro-batches"
_MEAN = "mean over the tokens in the loss, of all processes and micro-batches"
_STEPS = "all processes; mean over optimizer steps"
_ALWAYS = "always, unless the loss had no tokens"
_TOKENS = Logs(_WEIGHTED, _ALWAYS)
_COUNTED = Logs(_MEAN, _ALWAYS)
_BY_BYTES = Logs(_MEAN, '`cross_tokenizer="bytes"`')
_RANKED = Logs("mean over one in 16 tokens in the loss, of all processes and micro-batches", _ALWAYS)
_ROWS = Logs(_WEIGHTED, f"{_ALWAYS}; in training not where processes share rows")
_PLACES = Logs(_WEIGHTED, "as `divergence/high_entropy`, if a token counts there")
_TEACHERS = Logs(_WEIGHTED, "several teachers, of those that had a token in the loss")
_GROUPS = Logs(
    "all processes; mean over prompts with at least two completions in the loss, then over steps",
    "`num_generations` above 1, in evaluations `num_generations_eval`; not where processes share rows",
)
_MIXED = Logs(_STEPS, "`lmbda` below 1; not where processes share rows", evaluated=False)
_MIXED_SOME = Logs(f"{_STEPS} that had some", _MIXED.appears, evaluated=False)
_WITH_TOOLS = "`tools`, or an `environment_factory`"
_BATCHES = "all processes; mean over generation batches, or over the rows of an evaluation"
_GENERATED = Logs(_BATCHES, "where the student generated some (`lmbda`)")
_WITH_REWARDS = "`reward_funcs`"
_REWARDS = Logs(
    "all processes; over all rows of an evaluation, or over those of a step and then the mean over steps",
    f"{_WITH_REWARDS}; where a function gave one",
)
_PHASE = "main process; mean over optimizer steps, sum over an evaluation"
_PHASES = Logs(_PHASE, _ALWAYS)
_OVERLAP = Logs(_STEPS, '`overlap="step"` with a rollout that generates in another process', evaluated=False)
_WITH_SYNC = "rollouts with vLLM, after a weight sync"
_SYNC = Logs("all processes; mean over weight syncs", _WITH_SYNC)
_PROOF = "as `sync/seconds`, if `vllm_sync_check` verified the sync"
_IMAGES = Logs(_BATCHES, "prompts with images")
_ENGINE = '`divergence="sampled_reverse_kl"` with an engine, at temperature 1, without tools'
_AHEAD = '`overlap="ahead"`'
_SKIPS = 'every log of a loss with `nonfinite="skip"`; otherwise once a float16 loss scale skipped a step'
_VISITS = "`skip_prompts`, or a `prompt_weight_fn`"
_TENTHS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "last")

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "divergence/mean": Metric("nats", "Between teacher and student, per token.", _TOKENS, "divergence / weight"),
        "divergence/clipped": Metric(
            "1", "Share with a clipped entry.", Logs(_MEAN, "a clip of entries"), "clipped / tokens"
        ),
        "divergence/high_entropy": Metric(
            "nats",
            "`divergence/mean` of the fifth of each completion's tokens with the highest `entropy/student`.",
            _ROWS,
            "high_entropy_divergence / high_entropy_weight",
        ),
        **{
            f"divergence/position_{tenth}": Metric(
                "nats",
                f"`divergence/mean` of the {ordinal} tenth of each completion.",
                _PLACES,
                f"divergence_{tenth} / weight_{tenth}",
            )
            for tenth, ordinal in enumerate(_TENTHS)
        },
        "divergence/teacher/<name>": Metric(
            "nats", "`divergence/mean` of this teacher's rows.", _TEACHERS, "divergence/<name> / weight/<name>"
        ),
        "entropy/student": Metric(
            "nats", "Of the student's next-token distribution.", _TOKENS, "student_entropy / weight"
        ),
        "entropy/teacher": Metric(
            "nats", "Of the teacher's next-token distribution.", _TOKENS, "teacher_entropy / weight"
        ),
        "entropy/teacher/<name>": Metric(
            "nats", "`entropy/teacher` of this teacher's rows.", _TEACHERS, "teacher_entropy/<name> / weight/<name>"
        ),
        **{
            f"cross/{name}": Metric(unit, meaning, _BY_BYTES, mean_of)
            for name, unit, meaning, mean_of in (
                (
                    "divergence",
                    "nats",
                    "Between teacher and student, per byte; with weights, of the weighted sum.",
                    "divergence / compared",
                ),
                ("used", "1", "Share of bytes that were compared.", "compared / outcomes"),
                ("escape", "1", "Share left out as a model may cut them otherwise.", "escaped / outcomes"),
                (
                    "lost",
                    "1",
                    "Share that the teacher's tokenizer does not read, or has no room for.",
                    "lost / outcomes",
                ),
            )
        },
        "agreement/first": Metric(
            "1", "Share with the same most likely token in both models.", _COUNTED, "same_first / tokens"
        ),
        "agreement/sampled": Metric(
            "1", "Share that is the teacher's most likely token.", _COUNTED, "teacher_first / tokens"
        ),
        "agreement/top": Metric(
            "1", "Share of a model's 16 most likely tokens that both have.", _RANKED, "top_shared / ranked"
        ),
        "agreement/top_mass": Metric(
            "1", "The student's probability of those that both have.", _RANKED, "top_mass / ranked"
        ),
        "pull/mean": Metric(
            "nats",
            "What rewards and completions of the dataset add to the divergence, per token.",
            Logs(_WEIGHTED, "rows with a `pull`", evaluated=False),
            "pulled / weight",
        ),
        "anchor/mean": Metric(
            "nats",
            "What the anchor adds to the divergence, per token.",
            Logs(_WEIGHTED, "`anchor_weight` above 0"),
            "anchored / weight",
        ),
        "gate/mean": Metric(
            "1",
            "Weight of a row by its reward; 0 where the teacher has no prompt of its own.",
            Logs(_BATCHES, "`reward_gate`, `teacher_context`, or a `teacher_prompt_fn` that takes rewards"),
        ),
        "prompts/skipped": Metric(
            "1", "Share of the prompts that nothing was generated for.", Logs(_STEPS, _VISITS, evaluated=False)
        ),
        "prompts/tokens_saved": Metric(
            "tokens",
            "Tokens of the completions of those prompts at their last visits.",
            Logs(_STEPS, _VISITS, evaluated=False),
        ),
        "prompts/tokens_saved_total": Metric(
            "tokens",
            "Sum of the same.",
            Logs("all processes; total since the run began", _VISITS, evaluated=False),
        ),
        "importance/mean": Metric(
            "1",
            "Importance weight of a sampled token, after its bound.",
            Logs(_MEAN, _ENGINE, evaluated=False),
            "importance / tokens",
        ),
        "group/divergence_std": Metric("nats", "Standard deviation of the divergences of a prompt's rows.", _GROUPS),
        "group/length_std": Metric("tokens", "The same of their numbers of tokens in the loss.", _GROUPS),
        "selection/share": Metric(
            "1",
            "Share of the tokens that are trained on; all other metrics of a training are of these.",
            Logs(_STEPS, "`token_selection`; not where processes share rows", evaluated=False),
        ),
        "selection/score": Metric(
            "nats",
            "Mean over all tokens of the score they are selected by: the student's entropy, or the divergence.",
            Logs(_STEPS, "`token_selection` by one of these", evaluated=False),
        ),
        "completions/length_drift": Metric(
            "1",
            "Mean length of the student's completions, divided by that of the first 10 optimizer steps.",
            Logs(_STEPS, f"{_ALWAYS}, or no completion of the student", evaluated=False),
        ),
        "completions/repeated_ratio": Metric(
            "1",
            "Share of the student's completions of whose last 32 tokens at most half of the 4-grams differ.",
            _GENERATED,
        ),
        "off_policy/share": Metric("1", "Share of rows in the loss that the student did not generate.", _MIXED),
        "off_policy/divergence": Metric("nats", "`divergence/mean` of those rows.", _MIXED_SOME),
        "on_policy/divergence": Metric("nats", "`divergence/mean` of the others.", _MIXED_SOME),
        "rewards/<name>/mean": Metric("of the function", "Without rows for which it returned `None`.", _REWARDS),
        "rewards/<name>/std": Metric("of the function", "Standard deviation of the same rewards.", _REWARDS),
        "reward": Metric("of the functions", "Sum of a completion's rewards times `reward_weights`.", _REWARDS),
        "reward_std": Metric("of the functions", "Standard deviation of the same sums.", _REWARDS),
        "frac_reward_zero_std": Metric(
            "1",
            "Share of completions whose rewards have the standard deviation 0 in their prompt, or step.",
            Logs(_STEPS, "`reward_weight` above 0", evaluated=False),
        ),
        "time/complete": Metric("seconds", "Generating, without `time/sync`; with `overlap`, waiting for it.", _PHASES),
        "time/sync": Metric("seconds", "Sending weights to vLLM, and verifying them.", Logs(_PHASE, _WITH_SYNC)),
        "time/reward": Metric("seconds", "Calling reward functions and models.", Logs(_PHASE, _WITH_REWARDS)),
        "time/act": Metric("seconds", "Waiting for tools and environments.", Logs(_PHASE, _WITH_TOOLS)),
        "turns/mean": Metric(
            "1", "Turns of a completion: one more than those that called tools.", Logs(_BATCHES, _WITH_TOOLS)
        ),
        "time/teach": Metric("seconds", "The teacher's forward passes, or waiting for its server.", _PHASES),
        "time/compare": Metric(
            "seconds", "Forward and backward pass of the student; under DeepSpeed also the optimizer step.", _PHASES
        ),
        "time/save": Metric(
            "seconds", "Writing a checkpoint.", Logs(_PHASE, "the first log after a checkpoint", evaluated=False)
        ),
        "tokens_per_second": Metric(
            "tokens per second",
            "Tokens in the loss, divided by the seconds of all phases but `save`.",
            Logs("tokens of all processes, seconds of the main process", _ALWAYS),
        ),
        "overlap/first_backward": Metric("seconds", "From a step's start until its first micro-batch ended.", _OVERLAP),
        "overlap/last_row": Metric("seconds", "From a step's start until its last row was generated.", _OVERLAP),
        "overlap/end": Metric("seconds", "From a step's start until its last micro-batch ended.", _OVERLAP),
        "overlap/staleness": Metric(
            "1",
            "Share of steps that trained on rows generated before the previous step.",
            Logs(_STEPS, _AHEAD, evaluated=False),
        ),
        "overlap/divergence": Metric(
            "nats per token",
            "How far the previous step has moved the student, from its distribution before that step.",
            Logs(_STEPS, f"{_AHEAD}, where rows were generated before that step", evaluated=False),
        ),
        "sync/seconds": Metric("seconds", "Sending the weights to vLLM, without the verification.", _SYNC),
        "sync/bytes": Metric("bytes", "Size of the tensors sent to the process's own engine, or the server.", _SYNC),
        "sync/proof_seconds": Metric("seconds", "Verifying a weight sync.", Logs(_SYNC.reduced, _PROOF)),
        "rollout/logprob_gap": Metric(
            "nats",
            "Largest difference between a log-probability of vLLM and the student's, in that verification.",
            Logs("maximum over processes; mean over weight syncs", _PROOF),
        ),
        "nonfinite/skipped_steps": Metric(
            "optimizer steps",
            "Steps skipped because of a loss or gradient that is NaN or infinite.",
            Logs("the same in all processes; total since `train` was called", _SKIPS, evaluated=False),
        ),
        "completions/limit": Metric(
            "tokens",
            "Most tokens of a completion in this step.",
            Logs(_STEPS, "`completion_length_start`", evaluated=False),
        ),
        "images/mean": Metric("images", "Images per prompt.", _IMAGES),
        "images/tokens": Metric("tokens", "Prompt tokens that stand for images, per prompt.", _IMAGES),
    }
)
"""By their names in the training log."""


def evaluated_names(datasets: Any, rewards: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """Names that evaluations log whenever there is a value, and prefixes of others; several `datasets` are named."""
    starts = [f"eval_{name}_" for name in datasets] if isinstance(datasets, Mapping) else ["eval_"]
    of_rewards = [f"rewards/{name}/{what}" for name in rewards for what in ("mean", "std")]
    logged = (
        name for name, one in METRICS.items() if one.logs.evaluated and (rewards or not name.startswith("reward"))
    )
    names = ("loss", "entropy", *of_rewards, *logged)
    of_any_name = ("completions/", "divergence/teacher/", "entropy/teacher/")
    known = [start + name for start in starts for name in names]
    return known, tuple(start + one for start in starts for one in of_any_name)


_OF_LOSS = ("divergence/", "entropy/", "agreement/", "pull/", "anchor/", "importance/", "time/", "tokens")
TAKEN = {
    *("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time"),
    *(name for name in METRICS if name.startswith(_OF_LOSS)),
}
"""Names that are logged elsewhere, which would overwrite a recorded number or be overwritten."""
