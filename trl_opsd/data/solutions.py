"""Accepts the column and placeholder `solution`, of TRL's draft of such a trainer, as `privileged_context`."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

logger = get_logger(__name__)

_THEIRS, _OURS = "solution", "privileged_context"


def named_as_here(template: Any) -> Any:
    """A `teacher_prompt_template` with the placeholder `{solution}` under its name here; anything else unchanged."""
    return template.replace(f"{{{_THEIRS}}}", f"{{{_OURS}}}") if isinstance(template, str) else template


def has_only_solutions(dataset: Any) -> bool:
    """Whether a dataset has a column `solution`, and no column that gives a teacher another prompt."""
    columns = set(getattr(dataset, "column_names", None) or ())
    return _THEIRS in columns and not columns & {_OURS, "teacher_prompt"}


def solutions_as_context(datasets: Any) -> Any:
    """Renames the column `solution` where no other column gives a teacher another prompt."""
    if isinstance(datasets, dict):
        return type(datasets)({name: solutions_as_context(dataset) for name, dataset in datasets.items()})
    if isinstance(datasets, Dataset | IterableDataset) and has_only_solutions(datasets):
        logger.warning_once(f"The teacher reads the column '{_THEIRS}', as if it were called '{_OURS}'.")
        return datasets.rename_column(_THEIRS, _OURS)
    return datasets
