"""Conflicts between options and the trainer's arguments, in the form of `options/rules.py`, before anything is loaded.

Conditions read a [`~options.table.Situation`].
"""

from __future__ import annotations

import difflib

from datasets import Image
from transformers import Trainer

from trl_opsd._compat.sharding import launched
from trl_opsd.data.completions import COMPLETION
from trl_opsd.data.datasets import by_name
from trl_opsd.losses import SampledReverseKL
from trl_opsd.methods import METRICS
from trl_opsd.metrics import evaluated_names
from trl_opsd.options.rules import Rule, together
from trl_opsd.options.table import Situation, shown


def _unusable_optimizer(now: Situation) -> str:
    """The error on `optim`; transformers raises it when a training begins, with all models loaded."""
    of_the_launch = now.deepspeed_plugin.deepspeed_config if now.deepspeed_plugin else {}
    if now.optimizers[0] is not None or "optimizer" in of_the_launch:
        return ""
    try:
        Trainer.get_optimizer_cls_and_kwargs(now.args)
    except (ImportError, ValueError) as error:
        given = f" with `optim_args={now.optim_args!r}`" if now.optim_args else ""
        # One that needs the model says "pass a model": there will be one.
        return "" if "pass a" in str(error) else f"{given} cannot be used: {error}"
    return ""


_OF_ROWS = ("teacher_prompt_fn", "environments")
"""Arguments that are functions of a row."""

LEARNING = (
    Rule(
        lambda now: now.max_steps == 0,
        "`max_steps=0` means unset, like -1, so training would run for `num_train_epochs={0.num_train_epochs}`: set "
        "the number of optimizer steps, or, to evaluate only, do not pass `train_dataset`.",
    ),
    Rule(
        lambda now: now.max_steps < 0 and now.num_train_epochs == 0,
        "`num_train_epochs={0.num_train_epochs}`: training would end after 0 steps: set a larger number, or "
        "`max_steps`; to evaluate only, do not pass `train_dataset`.",
    ),
    Rule(_unusable_optimizer, "`optim={0.optim.value!r}`{1}"),
)
"""Of a training, which would not end as meant, or not begin; one at a rate of 0 is refused when it begins."""


STORED = (
    Rule(
        lambda now: now.lmbda > 0 or now.seq_kd,
        "`teacher_targets` without a teacher, with `lmbda={0.lmbda:g}` and `seq_kd={0.seq_kd}`: there are targets of "
        "completions that were written before, and none of those that are generated now: set `lmbda=0` and "
        "`seq_kd=False` (`trl-opsd targets` keeps generated completions beside the targets, as a dataset), or pass the "
        "teacher too, which then reads what is not there.",
    ),
    Rule(
        lambda now: now.eval_dataset is not None,
        "`eval_dataset` with `teacher_targets` and no teacher: an evaluation compares completions that it generates: "
        "pass the teacher too, or remove it.",
    ),
)
"""Of teachers that are only on disk."""

EVALUATING = (
    Rule(
        lambda now: now.eval_strategy == "no" and (now.save_strategy == "best" or now.load_best_model_at_end),
        "`save_strategy='best'` or `load_best_model_at_end=True` without evaluations, so there would be no best model: "
        "set `eval_strategy` and pass an `eval_dataset`, or remove the option.",
    ),
    Rule(
        lambda now: now.eval_strategy != "no" and (now.eval_dataset is None or now.eval_dataset == {}),
        "`eval_strategy={0.eval_strategy.value!r}` without an `eval_dataset`: pass one, or remove `eval_strategy`.",
    ),
)
"""Of evaluations without rows, and a best model without evaluations."""

BUILDING = (
    Rule(
        lambda now: now.teacher_prompt_fn is not None and now.seq_kd,
        "`teacher_prompt_fn` with `seq_kd=True`: the function needs a completion, but the teacher needs its prompt "
        "to generate one: add a column 'teacher_prompt' or 'privileged_context' instead.",
    ),
    *EVALUATING,
    Rule(
        lambda now: (
            now.environments is not None
            and (
                (now.overlap == "ahead" and shown("overlap", now.overlap))
                or (now.lmbda < 1 and shown("lmbda", now.lmbda))
            )
        ),
        "`environment_factory` with {1}: an environment begins with each row, and tells what its teacher reads: remove "
        "one of them.",
    ),
    Rule(
        lambda now: now.cross_tokenizer and now.tools,
        "`cross_tokenizer='bytes'` with `tools`: what tools answer is text of the student's template: remove one of "
        "them.",
    ),
    Rule(
        lambda now: now.cross_tokenizer and isinstance(now.objective, SampledReverseKL),
        "`cross_tokenizer='bytes'` with `SampledReverseKL`, which compares tokens: pass another divergence.",
    ),
    Rule(
        lambda now: (
            now.remove_unused_columns and next((name for name in _OF_ROWS if getattr(now, name) is not None), "")
        ),
        "`remove_unused_columns=True` would hide columns from `{1}`: set it to False.",
    ),
)
"""Of a trainer."""


def _metric(now: Situation) -> tuple[str, str] | None:
    """A metric that no evaluation logs by itself, and the closest; transformers fails after the first evaluation."""
    if now.metric_for_best_model is None or now.eval_strategy == "no":
        return None
    known, beginnings = evaluated_names(METRICS, now.eval_dataset, now.rewards)
    metric = f"eval_{now.metric_for_best_model.removeprefix('eval_')}"
    if metric in known or metric.startswith(beginnings):
        return None
    usual = "eval_reward" if now.rewards else "eval_loss"
    return metric, (difflib.get_close_matches(metric, known, n=1, cutoff=0.75) or [usual])[0]


def _ignored_column(name: str, instead: str) -> Rule:
    """A column that other trainers read."""

    def dataset_with_it(now: Situation) -> str:
        is_read = name in now.row_columns or (
            name == COMPLETION and (now.rewards or now.teacher_prompt_fn is not None or now.lmbda < 1)
        )
        datasets = {} if is_read else {"train_dataset": now.train_dataset, **by_name(now.eval_dataset)}
        having = (where for where, one in datasets.items() if name in (getattr(one, "column_names", None) or ()))
        return next(having, "")

    return Rule(dataset_with_it, f"The column {name!r} of {{1}} is not used: {instead}; or remove the column.", True)


def _unread_images(now: Situation) -> str:
    """A column of images that nothing reads, for a student that can see."""
    if now.rewards or any(getattr(now, name) is not None for name in _OF_ROWS):
        return ""
    datasets = {"train_dataset": now.train_dataset, **by_name(now.eval_dataset)}
    features = ((where, (getattr(one, "features", None) or {}).items()) for where, one in datasets.items())
    found = (
        f"{name!r} of {where}"
        for where, columns in features
        for name, kind in columns
        if name not in now.row_columns and isinstance(getattr(kind, "feature", kind), Image)
    )
    return next(found, "")


SEEING = (
    together(" cannot read rows with images, which are not concatenated: remove the option.", padding_free=True),
    Rule(
        lambda now: launched(now.args).sp_enabled,
        "`parallelism_config`: `sp_size` cannot divide rows with images: remove it from the accelerate file.",
    ),
    together(" cannot compare rows with images: remove the option, or the images.", cross_tokenizer="bytes"),
)
"""Of prompts with images, the teacher's too."""

GENERATING_SEEN = (
    Rule(
        lambda now: not now.rollout.reads_images,
        "The rollout ({0.rollout}) does not read images, but prompts have some: generate with `transformers` or a "
        "colocated vLLM, or set `reads_images = True` in a rollout of your own that reads `prompt_ids[row].images`.",
    ),
)
"""Of the student's prompts with images."""

UNSEEN = (
    Rule(
        _unread_images,
        "The column {1} has images, but nothing reads it: call it 'images' to show them to the student, or "
        "'teacher_images' to the teacher; or remove it.",
        warns=True,
    ),
)
"""Of columns beside a processor, which could read images."""

SURPRISES = (
    _ignored_column(
        "tools",
        "pass the functions as the trainer's argument `tools` for all rows, or put those of a single row into its "
        "messages",
    ),
    _ignored_column("chat_template_kwargs", "set the option `chat_template_kwargs`, which applies to all rows"),
    _ignored_column(
        COMPLETION,
        "with `lmbda=1` the student generates every completion; set `lmbda` below 1 to train on these too",
    ),
    Rule(
        _metric,
        "`metric_for_best_model={0.metric_for_best_model!r}`: evaluations do not log {1[0]!r} by default, and training "
        "fails if an evaluation lacks it. Did you mean {1[1]!r}?",
        warns=True,
    ),
)
"""Of a trainer that may have another effect than one expects."""
