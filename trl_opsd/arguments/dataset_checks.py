"""Checks the datasets a user passes: their types, columns and sizes, and the shapes of their rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from trl_opsd._compat.peft import is_peft
from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import Rows, look_ahead
from trl_opsd.data.completions import COMPLETION, check_completion
from trl_opsd.data.datasets import AnyDataset, check_alike, columns_of, describe_rows
from trl_opsd.data.prompts import IMAGE_COLUMNS, check_columns, refuse_images
from trl_opsd.data.readers import Intake
from trl_opsd.data.survey import has_transform, has_values
from trl_opsd.data.teacher_prompts import COLUMNS, PRIVILEGED
from trl_opsd.options.rules import batch_in_words, prompts_of_step


def surveyed(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, names_teachers: bool = False
) -> dict[str, Rows]:
    """The datasets that are there, each with the shapes and sizes of its rows, by teacher if rows name one."""
    columns = [name for name in COLUMNS if names_teachers or name != "teacher"]
    progress = args.process_index == 0 and not args.disable_tqdm
    return {name: Rows.of(one, name, columns, progress) for name, one in datasets.items() if one is not None}


def looked_through(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, intake: Intake, columns: Collection[str]
) -> dict[str, Rows]:
    """The datasets that are there, surveyed, after the checks of their rows that need no tokenizer. Collective."""
    rows = surveyed(datasets, args, len(intake.teachers) > 1)
    for one in rows.values():
        look_ahead(one, intake)
    if args.world_size > 1:
        check_alike(gather_object([{name: describe_rows(one, columns) for name, one in datasets.items()}]))
    return rows


def check_datasets(
    datasets: Mapping[str, AnyDataset | None],
    args: OPSDConfig,
    teachers: Collection[str] = (),
    optional: Collection[str] = (),
    needs_privilege: bool = False,
) -> None:
    """Checks types, columns and sizes; the rows are read later, when the tokenizer is loaded.

    Of the `optional` columns, a misspelt one is refused. With `needs_privilege`, one has to give the teacher context
    that the student does not see.
    """
    if datasets.keys() == {"train_dataset", "eval_dataset"} and not any(one is not None for one in datasets.values()):
        raise ValueError("`train_dataset` is None: pass a dataset with a column 'prompt'.")
    for where, dataset in datasets.items():
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(f"`{where}` is {_what_to_pass(dataset, where)}.")
        columns = columns_of(dataset)
        check_columns(columns, where, teachers, optional, dataset.features)
        _check_stored_images(dataset, where)
        if needs_privilege and columns is not None and not set(PRIVILEGED) & set(columns):
            raise ValueError(
                f"The student is its own teacher (`teacher_model_kind={args.teacher_model_kind!r}`), but {where} has "
                f"no context for the teacher that the student does not see; it has only {columns}. Add a column "
                "'privileged_context' or 'teacher_prompt', or pass `teacher_prompt_fn`; or set `teacher_temperature`."
            )
        if where == "train_dataset":
            check_train_size(dataset, args)
        elif isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{where}` has no rows: add some, or leave it out.")


def check_completions(dataset: AnyDataset | None, tools: Any, from_dataset: bool) -> None:
    """Checks the completions that `lmbda` below 1 learns from, as far as they can be read ahead."""
    if tools:
        raise ValueError("`lmbda` below 1 with `tools`: a completion of the dataset calls none: set `lmbda=1`.")
    if dataset is None or not from_dataset:
        return
    columns = columns_of(dataset)
    if columns is not None and COMPLETION not in columns:
        raise ValueError(
            f"`lmbda` below 1 learns from a column 'completion', but train_dataset has only {columns}: add one, or set "
            "`lmbda=1`."
        )
    if isinstance(dataset, Dataset) and not has_transform(dataset):
        for number, row in enumerate(dataset.with_format(None).select_columns(["prompt", COMPLETION])):
            check_completion(row, f"row {number} of train_dataset")


def needs_privilege(student: Any, args: OPSDConfig, teacher_prompt_fn: Any) -> bool:
    """Whether a column has to give the teacher context, because it starts as the student and reads nothing else.

    Without the adapter it came with, a student is another model.
    """
    kind = args.teacher_model_kind
    is_another = kind is None or (kind == "base" and not isinstance(student, str) and is_peft(student))
    return not (is_another or teacher_prompt_fn is not None or args.teacher_template_kwargs)


def _what_to_pass(given: Any, where: str) -> str:
    """What was given for a dataset, and what to give instead."""
    kind = type(given).__name__
    if isinstance(given, Mapping) and all(isinstance(part, Dataset | IterableDataset) for part in given.values()):
        some = next((name for name in ("train", "test", "validation") if name in given), next(iter(given), "train"))
        return f"a {kind} of {sorted(given)}: pass one of them, `{where}=...[{some!r}]`"
    if isinstance(given, str | Path):
        suffix = Path(given).suffix.lstrip(".").removesuffix("l")
        files = f"{suffix!r}, data_files={str(given)!r}" if suffix in ("json", "csv", "parquet") else repr(str(given))
        return f"a {kind}: pass what it names, `load_dataset({files}, split='train')`"
    makers = {"list": "from_list(rows)", "dict": "from_dict(columns)", "DataFrame": "from_pandas(frame)"}
    return (
        f"a {kind}: expected a `datasets.Dataset` or `IterableDataset`, for instance "
        f"`Dataset.{makers.get(kind, 'from_list(rows)')}`"
    )


def _check_stored_images(dataset: AnyDataset, where: str) -> None:
    """Refuses images in the rows of a map-style dataset; the rows of a stream are checked when they are used."""
    if isinstance(dataset, Dataset):
        for name in IMAGE_COLUMNS:
            if name in dataset.column_names and has_values(dataset, name):
                refuse_images(name, where)


def check_train_size(dataset: AnyDataset, args: OPSDConfig) -> None:
    """Checks that a dataset fills one generation batch; for a stream, that `max_steps` is set.

    Raises:
        ValueError: The dataset is too small, so that training would end after 0 steps; or it is a stream and
            `max_steps` is not set.
    """
    if isinstance(dataset, IterableDataset) and args.max_steps <= 0:
        raise ValueError(
            f"`max_steps={args.max_steps}`: `train_dataset` is a stream, whose length is not known: set `max_steps` to "
            "the number of optimizer steps."
        )
    if isinstance(dataset, Dataset) and len(dataset) < prompts_of_step(args):
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but one generation batch takes {batch_in_words(args)}, and rows "
            "that do not fill one are dropped, so there would be 0 steps: add rows, or lower one of those numbers."
        )
