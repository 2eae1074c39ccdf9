"""TRL's other names for columns, and conversations as prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import PartialState
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_opsd.data.prompts import check_prompt
from trl_opsd.data.survey import has_transform

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


_COLUMN = "messages"


def with_prompts(datasets: Any, where: str) -> Any:
    """Replaces `messages` by `prompt` and `completion` in datasets without prompts; other objects stay as they are."""
    if isinstance(datasets, dict):
        named = {name: with_prompts(dataset, f"{where}[{name!r}]") for name, dataset in datasets.items()}
        return type(datasets)(named)
    if not _has_conversations(datasets):
        return datasets
    if "completion" in (datasets.column_names or ()):
        raise ValueError(
            f"{where} has a column {_COLUMN!r} and a column 'completion', and no 'prompt': the answer at the end of a "
            "conversation is its completion, so leave one of the two out, or add the prompts."
        )
    given = {"with_indices": True, "remove_columns": [_COLUMN], "fn_kwargs": {"where": where}}
    if isinstance(datasets, IterableDataset):
        return datasets.map(_split_row, **given)
    with PartialState().local_main_process_first():  # the other processes find it in the cache
        return datasets.with_format(None).map(_split_row, desc=f"Splitting the conversations of {where}", **given)


def _has_conversations(dataset: Any) -> bool:
    if not isinstance(dataset, Dataset | IterableDataset):
        return False
    if isinstance(dataset, Dataset) and has_transform(dataset):  # the transform may create prompts
        return False
    columns = dataset.column_names or ()
    kind = str((dataset.features or {}).get(_COLUMN, "'role'"))  # a stream may not know its features
    return _COLUMN in columns and "prompt" not in columns and "'role'" in kind


def _split_row(row: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    return split(row[_COLUMN], f"row {number} of {where}")


def split(messages: Any, where: str) -> dict[str, Any]:
    """The prompt and the completion of a conversation, which must end with an answer of the assistant."""
    name = f"The conversation in {where}"
    if check_prompt(messages, name) == "text":
        raise TypeError(f"{name} is text: expected a list of messages; call the column 'prompt' if it is one.")
    if (role := messages[-1]["role"]) != "assistant":
        raise ValueError(
            f"{name} ends with a message of the {role}, but in a column {_COLUMN!r} the last message is the answer of "
            f"the assistant: leave out what comes after it, or call the column 'prompt' if the student is to answer."
        )
    if len(messages) == 1:
        raise ValueError(
            f"{name} has nothing before the answer: give the model something to answer, or remove the row."
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}
