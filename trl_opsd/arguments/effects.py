"""Warns of what would change nothing: columns that are not read, metrics that are not logged, equal models."""

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
from trl_opsd.models.checks import same_weights
from trl_opsd.monitor.metrics import evaluated_names

logger = get_logger(__name__)

_NOT_READ = {
    "tools": "pass the functions as the trainer's argument `tools`, the same for all rows, or write a row's own into "
    "its messages",
    "chat_template_kwargs": "set the option `chat_template_kwargs`, the same for all rows",
    COMPLETION: "with `lmbda=1` every completion is the student's own; set `lmbda` below 1 to learn from these too",
}
"""Columns that other trainers read, and what to do instead."""


def warn_of_metric(args: OPSDConfig, eval_dataset: Any, rewards: Collection[str] = ()) -> None:
    """Warns if no evaluation logs `metric_for_best_model` by itself; transformers fails after the first one."""
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


def warn_of_same_model(
    student: Any,
    teachers: Mapping[str, Any],
    args: OPSDConfig,
    datasets: Mapping[str, AnyDataset | None],
    tells_more: bool,
) -> bool:
    """Warns of a teacher that is the student and reads nothing more: the divergence is 0, and stays 0."""
    if tells_more or args.tempers_apart or args.pulls or may_have(datasets, PRIVILEGED):
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
    """Warns of columns that are not read here, although other trainers would; those in `read` are, or need no word."""
    for name, instead in _NOT_READ.items():
        having = [where for where, one in datasets.items() if name in (getattr(one, "column_names", None) or ())]
        if having and name not in read:
            logger.warning(f"The column {name!r} of {having[0]} is not read: {instead}; or remove the column.")


def warn_of_splits(eval_dataset: Any) -> None:
    """Warns if a whole `DatasetDict` is evaluated, of which one split is what one trains on."""
    if isinstance(eval_dataset, DatasetDict | IterableDatasetDict) and "train" in eval_dataset:
        logger.warning(
            f"`eval_dataset` is a {type(eval_dataset).__name__}: each evaluation takes all of its splits, 'train' too. "
            "Pass one of them, or a dict of some."
        )


def may_have(datasets: Mapping[str, AnyDataset | None], names: Collection[str]) -> bool:
    """Whether a dataset has one of these columns, or has columns that are not known."""
    columns = [columns_of(one) for one in datasets.values() if one is not None]
    return any(one is None or not set(names).isdisjoint(one) for one in columns)
