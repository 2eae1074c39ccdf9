"""Refuses, or tells of, what would change nothing: rates and steps of 0, options that are not read, equal models."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from accelerate.logging import get_logger
from datasets import DatasetDict, IterableDatasetDict

from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import COMPLETION
from trl_opsd.data.datasets import AnyDataset, columns_of
from trl_opsd.data.teacher_prompts import PRIVILEGED
from trl_opsd.models.model_checks import same_weights
from trl_opsd.run.metrics import evaluated_names
from trl_opsd.run.without_effect import described, without_effect

logger = get_logger(__name__)

_NOT_READ = {
    "tools": "pass the functions as the trainer's argument `tools`, the same for all rows, or write a row's own into "
    "its messages",
    "chat_template_kwargs": "set the option `chat_template_kwargs`, the same for all rows",
    COMPLETION: "with `lmbda=1` every completion is the student's own; set `lmbda` below 1 to learn from these too",
}
"""Columns that other trainers read, and what to do instead."""


def check_that_it_learns(args: OPSDConfig, train_dataset: Any, optimizers: tuple[Any, Any]) -> None:
    """Refuses options with which a training would change nothing, or last as long as nobody asked for.

    Args:
        args ([`OPSDConfig`]):
            The options.
        train_dataset (`Any`):
            `None` for a trainer that only evaluates, which may have any of them.
        optimizers (`tuple`):
            Optimizer and scheduler as they were passed.

    Raises:
        ValueError: The rate or the number of steps is 0.
    """
    if train_dataset is None:
        return
    if args.max_steps == 0:
        raise ValueError(
            "`max_steps=0` means that it is not set, as -1 does, and training would last "
            f"`num_train_epochs={args.num_train_epochs}`: set the number of optimizer steps, or leave `train_dataset` "
            "out to evaluate only."
        )
    if args.max_steps < 0 and args.num_train_epochs == 0:
        raise ValueError(
            f"`num_train_epochs={args.num_train_epochs}`: training would end after 0 steps: set more, or `max_steps`; "
            "to evaluate only, leave `train_dataset` out."
        )
    optimizer, _ = optimizers
    groups = [] if optimizer is None else getattr(optimizer, "param_groups", [])
    rates = [group.get("initial_lr", group.get("lr")) for group in groups]  # a warmup begins at 0
    if optimizer is None and args.learning_rate == 0:
        raise ValueError(
            f"`learning_rate={args.learning_rate}`: no weight would change: set a rate, 1e-6 to 1e-5 for most models "
            "and about ten times as much for LoRA; to evaluate only, leave `train_dataset` out."
        )
    if rates and all(rate == 0 for rate in rates):
        raise ValueError(
            "All parameters of the optimizer have a learning rate of 0, so no weight would change: set `lr`."
        )


def check_evaluation(args: OPSDConfig, eval_dataset: Any) -> None:
    """Refuses evaluations without rows, and a best model without evaluations, before the student is loaded.

    Args:
        args ([`OPSDConfig`]):
            The options.
        eval_dataset (`Any`):
            As the trainer takes it.

    Raises:
        ValueError: `eval_strategy` is set and there is no dataset, or it is not set and something depends on it.
    """
    best = {
        "save_strategy='best'": args.save_strategy == "best",
        "load_best_model_at_end=True": args.load_best_model_at_end,
    }
    for option in (option for option, is_set in best.items() if is_set):
        if args.eval_strategy == "no":
            raise ValueError(
                f"`{option}` without evaluations, so that no model would be the best: set `eval_strategy`, with an "
                "`eval_dataset`, or leave it out."
            )
        if args.metric_for_best_model is None:
            raise ValueError(f"`{option}` without `metric_for_best_model`: set one, for instance 'loss'.")
    if args.eval_strategy != "no" and (eval_dataset is None or eval_dataset == {}):
        raise ValueError(
            f"`eval_strategy={args.eval_strategy.value!r}` without an `eval_dataset`: pass one, or leave it out."
        )


def warn_of_metric(args: OPSDConfig, eval_dataset: Any, rewards: Collection[str] = ()) -> None:
    """Says that no evaluation logs `metric_for_best_model` by itself; transformers fails after the first one.

    Args:
        args ([`OPSDConfig`]):
            The options.
        eval_dataset (`Any`):
            As the trainer takes it; the metrics of each of several have its name.
        rewards (`Collection[str]`, *optional*):
            Names of the reward functions.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    known, beginnings = evaluated_names(eval_dataset, rewards)
    asked = f"eval_{metric.removeprefix('eval_')}"
    if asked in known or asked.startswith(beginnings):
        return
    close = difflib.get_close_matches(asked, known, n=1) or known[:1]
    logger.warning(
        f"`metric_for_best_model={metric!r}`: no evaluation logs {asked!r} by itself, and one without it ends the "
        f"training with an error. Did you mean {close[0]!r}?"
    )


def warn_of_options(
    args: OPSDConfig,
    teachers: Mapping[str, Any],
    own_rollout: bool,
    optimizers: tuple[Any, Any],
    tools: Any,
    divergence: Any,
    rewards: int,
) -> tuple[str, ...]:
    """Says which options are set and have no effect, or not the whole of it.

    Args:
        args ([`OPSDConfig`]):
            The options.
        teachers (`Mapping[str, Any]`):
            As the user passed them; `None` is the student itself.
        own_rollout (`bool`):
            Whether a rollout was passed.
        optimizers, tools, divergence:
            As they were passed.
        rewards (`int`):
            Number of reward functions.

    Returns:
        `tuple[str, ...]`: The options that are set and have no effect.
    """
    found = without_effect(
        args,
        own_rollout=own_rollout,
        teachers=list(teachers.values()),
        optimizers=optimizers,
        tools=tools,
        divergence=divergence,
        rewards=rewards,
    )
    if found:
        logger.warning(described(args, found))
    if args.neftune_noise_alpha:
        logger.warning(
            f"`neftune_noise_alpha={args.neftune_noise_alpha:g}`: the figures of the training log, as "
            "`divergence/mean`, are those of a student with noise in its embeddings, and may be many times larger than "
            "without: compare evaluations, which have none."
        )
    if optimizers[1] is None and 0 < args.max_steps < args.warmup_steps:
        logger.warning(
            f"`warmup_steps={args.warmup_steps:g}` with `max_steps={args.max_steps}`: training ends before the rate "
            f"reaches `learning_rate={args.learning_rate}`. Set fewer; below 1, it is a share of all steps."
        )
    return tuple(found)


def warn_of_same_model(
    student: Any,
    teachers: Mapping[str, Any],
    args: OPSDConfig,
    datasets: Mapping[str, AnyDataset | None],
    tells_more: bool,
) -> bool:
    """Says that a teacher is the student, if it reads nothing more: the divergence is 0, and stays 0.

    Args:
        student (`Any`):
            A path, a model id or a model.
        teachers (`Mapping[str, Any]`):
            As the user passed them.
        args ([`OPSDConfig`]):
            Contains the options for loading them.
        datasets (`Mapping`):
            By name; those whose columns are not known may have any.
        tells_more (`bool`):
            Whether the teacher's prompts differ without a column for them.

    Returns:
        `bool`: Whether that was said.
    """
    if tells_more or args.tempers_apart or args.pulls or _may_have(datasets, PRIVILEGED):
        return False
    loading = args.model_init_kwargs or {}
    theirs = {"revision": args.teacher_model_revision, **(args.teacher_model_init_kwargs or {})}
    same = [teacher for teacher in teachers.values() if same_weights(student, loading, teacher, theirs)]
    if len(teachers) > 1:  # for the rows of one, the student is held where it was
        return False
    for teacher in same:
        logger.warning(
            f"The teacher and the student are the same model, {teacher!r}, and read the same prompts: the divergence "
            "is 0 and stays 0, so nothing is learned. Pass another teacher, or a column 'privileged_context' that only "
            "the teacher reads."
        )
    return bool(same)


def warn_of_columns(datasets: Mapping[str, Any], read: Collection[str]) -> None:
    """Says which columns are not read here, although other trainers would.

    Args:
        datasets (`Mapping[str, Any]`):
            By name, as they were passed.
        read (`Collection[str]`):
            Columns that are read, or need no word.
    """
    for name, instead in _NOT_READ.items():
        having = [where for where, one in datasets.items() if name in (getattr(one, "column_names", None) or ())]
        if having and name not in read:
            logger.warning(f"The column {name!r} of {having[0]} is not read: {instead}; or remove the column.")


def warn_of_splits(eval_dataset: Any) -> None:
    """Says that a whole `DatasetDict` is evaluated, if one of its splits is what one trains on.

    Args:
        eval_dataset (`Any`):
            As the trainer takes it.
    """
    if isinstance(eval_dataset, DatasetDict | IterableDatasetDict) and "train" in eval_dataset:
        logger.warning(
            f"`eval_dataset` is a {type(eval_dataset).__name__}: each evaluation takes all of its splits, 'train' too. "
            "Pass one of them, or a dict of some."
        )


def warn_of_template(args: OPSDConfig, datasets: Mapping[str, AnyDataset | None], has_function: bool) -> None:
    """Says that a template for the teacher's prompts is not used.

    Args:
        args ([`OPSDConfig`]):
            Contains the template.
        datasets (`Mapping`):
            By name; those whose columns are not known may have any.
        has_function (`bool`):
            Whether `teacher_prompt_fn` was passed, which writes the prompts instead.
    """
    if args.teacher_prompt_template is None:
        return
    given = f"`teacher_prompt_template={args.teacher_prompt_template!r}` has no effect"
    if has_function:
        logger.warning(f"{given}: `teacher_prompt_fn` writes the teacher's prompts. Remove one of them.")
    elif not _may_have(datasets, ("privileged_context",)):
        logger.warning(f"{given}: no dataset has a column 'privileged_context'. Add one, or remove the template.")


def _may_have(datasets: Mapping[str, AnyDataset | None], names: Collection[str]) -> bool:
    """Whether a dataset has one of these columns, or has columns that are not known."""
    columns = [columns_of(one) for one in datasets.values() if one is not None]
    return any(one is None or not set(names).isdisjoint(one) for one in columns)
