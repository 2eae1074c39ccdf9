"""The metrics that the trainer adds to TRL's log: their names, units and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trl_opsd.types.rollout import Author


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


WEIGHTED = "weighted mean over the tokens in the loss, of all processes and micro-batches"
MEAN = "mean over the tokens in the loss, of all processes and micro-batches"
STEPS = "all processes; mean over optimizer steps"
ALWAYS = "always, unless the loss had no tokens"
_TOKENS = Logs(WEIGHTED, ALWAYS)
_WHOLE = "teachers with whole distributions, not `top_k` targets"
_COUNTED = Logs(MEAN, f"{_WHOLE}; without `cross_tokenizer`")
_RANKED = Logs("mean over one in 16 tokens in the loss, of all processes and micro-batches", _COUNTED.appears)
_PLACES = Logs(WEIGHTED, "if a token there is in the loss; in training not with `sp_size`")
_BY_AUTHOR = {
    one: Logs(
        "as `…/teacher/<name>`", "unless all loss tokens are the student's", one in (Author.STUDENT, Author.DATASET)
    )
    for one in Author
}
_TEACHERS = Logs(WEIGHTED, "several teachers, of those that had a token in the loss")
_SEVERAL = "several teachers"
_WITH_TOOLS = "`tools`, or an `environment_factory`"
BATCHES = "all processes; mean over generation batches, or over the rows of an evaluation"
_GENERATED = Logs(BATCHES, "where the student generated some (`lmbda`)")
_PREFIXES = Logs(BATCHES, "`teacher_prefix_cache_gb`, where teachers can use it")
WITH_REWARDS = "the method `rewards`, or environments that reward"
_PHASE = "main process; mean over optimizer steps, sum over an evaluation"
_PHASES = Logs(_PHASE, ALWAYS)
_OVERLAP = Logs(STEPS, '`overlap="step"` with a rollout that generates in another process', evaluated=False)
_WITH_SYNC = "rollouts with vLLM, after a weight sync"
_SYNC = Logs("all processes; mean over weight syncs", _WITH_SYNC)
_PROOF = "as `sync/seconds`, if `vllm_sync_check` verified the sync"
_ENGINE = '`divergence="sampled_reverse_kl"` with an engine, `blend` or `speculative`, at temperature 1, without tools'
_SAMPLER = Logs(
    "mean over the tokens in the loss of one row in 16, of all processes and micro-batches",
    "engines, `blend` or `speculative`, at temperature 1, without `top_p` and the like, without tools",
)
_TOLD = Logs(MEAN, '`divergence="total_variation"` or `"negative_log_acceptance"`, whole distributions, no `kl_clip`')
_AHEAD = '`overlap="ahead"`'
_SKIPS = 'every log of a loss with `nonfinite="skip"`; otherwise once a float16 loss scale skipped a step'
_TENTHS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "last")

OF_TRAINER: Mapping[str, Metric] = MappingProxyType(
    {
        "divergence/mean": Metric("nats", "Divergence of both models, per token.", _TOKENS, "divergence / weight"),
        "divergence/clipped": Metric(
            "1", "Share of tokens at which `kl_clip` bounded an entry.", Logs(MEAN, "`kl_clip`"), "clipped / tokens"
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
        **{
            f"{name}/{one.word}": Metric(
                unit, f"{of} that the {one.word} wrote.", _BY_AUTHOR[one], mean + one.word + by
            )
            for one in Author
            for name, unit, of, mean, by in (
                ("divergence", "nats", "`divergence/mean` of the tokens", "divergence_", f" / weight_{one.word}"),
                ("tokens", "tokens", "Tokens in the loss", "tokens_", " / batches"),
            )
        },
        "divergence/teacher/<name>": Metric(
            "nats", "`divergence/mean` of this teacher's rows.", _TEACHERS, "divergence/<name> / weight/<name>"
        ),
        "tokens/teacher/<name>": Metric(
            "tokens",
            "Tokens in the loss of this teacher's rows.",
            Logs("all processes; mean over optimizer steps, sum over an evaluation", _SEVERAL),
            "tokens/<name> / batches",
        ),
        "loss_share/teacher/<name>": Metric(
            "1",
            "Share of the weights in the loss that this teacher's tokens have.",
            Logs("all processes and micro-batches", _SEVERAL),
            "weight/<name> / weight",
        ),
        "entropy/student": Metric(
            "nats", "Entropy of the student's next-token distribution.", _TOKENS, "student_entropy / weight"
        ),
        "entropy/teacher": Metric(
            "nats", "Entropy of the teacher's distribution.", Logs(WEIGHTED, _WHOLE), "teacher_entropy / weight"
        ),
        "entropy/teacher/<name>": Metric(
            "nats", "`entropy/teacher` of this teacher's rows.", _TEACHERS, "teacher_entropy/<name> / weight/<name>"
        ),
        "agreement/first": Metric(
            "1", "Share of tokens at which both models have the same likeliest token.", _COUNTED, "same_first / tokens"
        ),
        "agreement/sampled": Metric(
            "1", "Share of sampled tokens that are the teacher's likeliest.", _COUNTED, "teacher_first / tokens"
        ),
        "agreement/top": Metric(
            "1", "Share of the 16 likeliest tokens that both models have in common.", _RANKED, "top_shared / ranked"
        ),
        "agreement/top_mass": Metric(
            "1", "The student's probability of the tokens in both models' likeliest 16.", _RANKED, "top_mass / ranked"
        ),
        "teacher/tokens": Metric("tokens", "Tokens that teachers read for a generation batch.", _PREFIXES),
        "teacher/prefix_saved": Metric("tokens", "Tokens of shared prefixes that teachers did not read.", _PREFIXES),
        "acceptance": Metric(
            "1", "Probability that speculative decoding accepts a token of the student.", _TOLD, "accepted / tokens"
        ),
        "importance/mean": Metric(
            "1",
            "Importance weight of a sampled token, bounded by `clip_max`.",
            Logs(MEAN, _ENGINE, evaluated=False),
            "importance / tokens",
        ),
        "importance/gated": Metric(
            "1",
            "Share of tokens whose importance weight is below `clip_min`, hence 0.",
            Logs(MEAN, "as `importance/mean`, with `clip_min`", evaluated=False),
            "gated / tokens",
        ),
        "completions/repeated_ratio": Metric(
            "1",
            "Share of the student's completions in whose last 32 tokens at most half of the 4-grams are distinct.",
            _GENERATED,
        ),
        "completions/mean_length/teacher/<name>": Metric(
            "tokens", "Mean length of the completions of this teacher's rows.", Logs(BATCHES, _SEVERAL)
        ),
        "time/complete": Metric("seconds", "Generating, or with `overlap` waiting for rows; no `time/sync`.", _PHASES),
        "time/sync": Metric("seconds", "Sending weights to vLLM, and verifying them.", Logs(_PHASE, _WITH_SYNC)),
        "time/reward": Metric("seconds", "Calling reward functions and models.", Logs(_PHASE, WITH_REWARDS)),
        "time/act": Metric("seconds", "Waiting for tools and environments.", Logs(_PHASE, _WITH_TOOLS)),
        "turns/mean": Metric(
            "1", "Turns of a completion: the turns that called tools, and the last.", Logs(BATCHES, _WITH_TOOLS)
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
            Logs("tokens of all processes, seconds of the main process", ALWAYS),
        ),
        "overlap/first_backward": Metric("seconds", "From a step's start until its first micro-batch ended.", _OVERLAP),
        "overlap/last_row": Metric("seconds", "From a step's start until its last row was generated.", _OVERLAP),
        "overlap/end": Metric("seconds", "From a step's start until its last micro-batch ended.", _OVERLAP),
        "overlap/staleness": Metric(
            "1",
            "Share of steps that trained on rows generated before the previous step.",
            Logs(STEPS, _AHEAD, evaluated=False),
        ),
        "overlap/divergence": Metric(
            "nats per token",
            "Divergence of the student after the previous step from the student before it.",
            Logs(STEPS, f"{_AHEAD}, where rows were generated before that step", evaluated=False),
        ),
        "sync/seconds": Metric("seconds", "Sending the weights to vLLM, without the verification.", _SYNC),
        "sync/bytes": Metric("bytes", "Size of the tensors sent to the process's own engine, or the server.", _SYNC),
        "sync/proof_seconds": Metric("seconds", "Verifying a weight sync.", Logs(_SYNC.reduced, _PROOF)),
        "rollout/logprob_gap": Metric(
            "nats",
            "Largest difference between vLLM's and the student's log-probabilities at a weight sync.",
            Logs("maximum over processes; mean over weight syncs", _PROOF),
        ),
        "rollout/kl_sampler": Metric(
            "nats",
            "KL(sampler ‖ student) per token, estimated from the engine's log-probabilities of the tokens it sampled.",
            _SAMPLER,
            "sampler_kl / sampler_known",
        ),
        "nonfinite/skipped_steps": Metric(
            "optimizer steps",
            "Steps skipped because of a loss or gradient that is NaN or infinite.",
            Logs("the same in all processes; total since `train` was called", _SKIPS, evaluated=False),
        ),
    }
)
"""Metrics that belong to no method, by their names in the training log."""


def is_taken(name: str, metrics: Mapping[str, Metric]) -> bool:
    """Whether a number may not be recorded under a name, as others are logged under it and one would be lost."""
    elsewhere = ("loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "step_time", "tokens_per_second")
    return name in elsewhere or (name in metrics and (bool(metrics[name].mean_of) or name.startswith("time/")))
