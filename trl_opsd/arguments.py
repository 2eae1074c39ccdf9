"""Checks a trainer's arguments against each other before a model is loaded; `config.py` checks single options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl_opsd._compat.peft import CausalLM, is_peft
from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import look_ahead
from trl_opsd.data.datasets import AnyDataset, columns_of, describe_rows
from trl_opsd.data.intake import Intake
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits, check_columns, check_no_images
from trl_opsd.data.row_sharding import check_alike
from trl_opsd.data.teacher_prompts import TeacherPrompts
from trl_opsd.models.backbone import context_of
from trl_opsd.models.head import model_shape
from trl_opsd.models.model_checks import check_in_memory, check_own_loss, language_config
from trl_opsd.models.processing import check_processing_class, loaded_processing_class, text_tokenizer
from trl_opsd.models.special_tokens import configured_vocabulary, ensure_special_tokens
from trl_opsd.teacher.teacher_checks import check_teachers, check_tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The checked arguments of a trainer; no model is loaded yet."""

    models: dict[str, Any]
    """Teacher models, paths or model ids by name; `None` is the student itself."""
    intake: Intake
    """Parses rows, with the names of these teachers."""
    processing_class: Any
    """A tokenizer, or a processor around one."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer itself."""
        return text_tokenizer(self.processing_class)

    @property
    def processor(self) -> ProcessorMixin | None:
        """The processor, which is saved with the student; `None` if there is only a tokenizer."""
        return self.processing_class if isinstance(self.processing_class, ProcessorMixin) else None


def prepared(
    model: Any,
    teacher_model: Any,
    args: OPSDConfig,
    datasets: Mapping[str, AnyDataset | None],
    processing_class: Any,
    teacher_processing_class: Any,
    teacher_prompt_fn: Callable[[dict[str, Any], str], Any] | None,
    row_columns: Collection[str],
) -> Prepared:
    """Runs every check that needs no loaded model; the arguments are the trainer's.

    Raises:
        ValueError: Arguments contradict each other; the message says what to change.
        TypeError: An argument has an unsupported type.
    """
    teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    check_teachers(teacher_model, model, args)
    models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {"teacher": teacher_model}
    if processing_class is not None:
        check_processing_class(processing_class)
    if teacher_prompt_fn is not None and args.remove_unused_columns:
        raise ValueError("`remove_unused_columns=True` would hide columns from `teacher_prompt_fn`: leave it at False.")
    several = tuple(models) if len(models) > 1 else ()
    check_datasets(datasets, args, several, needs_privilege(model, args, teacher_prompt_fn))
    check_models(model, models, args)
    prompts = TeacherPrompts(template=args.teacher_prompt_template, prompt_fn=teacher_prompt_fn)
    intake = Intake(teachers=tuple(models), prompts=prompts)
    for name, dataset in datasets.items():
        if dataset is not None:
            look_ahead(dataset, name, intake)
    if args.world_size > 1:
        check_alike(gather_object([{name: describe_rows(one, row_columns) for name, one in datasets.items()}]))
    if processing_class is None:
        processing_class = loaded_processing_class(model, args.model_init_kwargs or {}, args.trust_remote_code)
        check_processing_class(processing_class)
    found = Prepared(models=models, intake=intake, processing_class=processing_class)
    ensure_special_tokens(found.tokenizer, configured_vocabulary(model, args.model_init_kwargs or {}))
    check_tokenizers(found.tokenizer, models, teacher_processing_class, args)
    return found


def needs_privilege(student: Any, args: OPSDConfig, teacher_prompt_fn: Any) -> bool:
    """Whether a column has to give the teacher context, because it starts as the student and reads nothing else.

    Without the adapter it came with, a student is another model.
    """
    kind = args.teacher_model_kind
    is_another = kind is None or (kind == "base" and not isinstance(student, str) and is_peft(student))
    return not (is_another or teacher_prompt_fn is not None or args.teacher_template_kwargs)


def check_models(student: Any, teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    """Refuses models that cannot be found or are not causal language models, before one is loaded.

    Args:
        student (`Any`):
            A path, a model id or a model.
        teachers (`Mapping[str, Any]`):
            The same by name; `None` for the student itself. A user's own [`~teacher.Teacher`] is not checked.
        args ([`OPSDConfig`]):
            Contains the options for loading them.

    Raises:
        ValueError: A model cannot be found or is not a causal language model, or the student adds an auxiliary loss in
            its forward, or is not in memory.
    """
    config = language_config(student, "model", args.model_init_kwargs or {})
    check_own_loss({**config, **(args.model_init_kwargs or {})})
    check_in_memory(student)
    place = {"revision": args.teacher_model_revision, **(args.teacher_model_init_kwargs or {})}
    for name, teacher in teachers.items():
        language_config(teacher, "teacher_model" if len(teachers) == 1 else f"teacher_model[{name!r}]", place)


def check_datasets(
    datasets: Mapping[str, AnyDataset | None],
    args: OPSDConfig,
    teachers: Collection[str] = (),
    needs_privilege: bool = False,
) -> None:
    """Checks types, columns and sizes; the rows are read later, when the tokenizer is loaded.

    Args:
        datasets (`Mapping`):
            By their names in messages.
        args ([`OPSDConfig`]):
            Determines the rows of a batch.
        teachers (`Collection[str]`, *optional*):
            Names of the teachers, when there are several.
        needs_privilege (`bool`, *optional*, defaults to `False`):
            Whether the columns must contain context for the teacher that the student does not see.

    Raises:
        ValueError: A dataset is missing, empty or too small, or lacks a column.
        TypeError: A value is not a dataset.
    """
    if datasets.keys() == {"train_dataset", "eval_dataset"} and not any(one is not None for one in datasets.values()):
        raise ValueError("`train_dataset` is None: pass a dataset with a column 'prompt'.")
    for where, dataset in datasets.items():
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(
                f"`{where}` is a {type(dataset).__name__}: expected a `datasets.Dataset` or `IterableDataset`, for "
                "instance `Dataset.from_list(rows)`."
            )
        columns = columns_of(dataset)
        check_columns(columns, where, teachers)
        _check_stored_images(dataset, where)
        if needs_privilege and columns is not None and not {"teacher_prompt", "privileged_context"} & set(columns):
            raise ValueError(
                f"The student is its own teacher (`teacher_model_kind={args.teacher_model_kind!r}`), but {where} has "
                f"no context for the teacher that the student does not see; it has only {columns}. Add a column "
                "'privileged_context' or 'teacher_prompt', or pass `teacher_prompt_fn`."
            )
        if where == "train_dataset":
            check_train_size(dataset, args)
        elif isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{where}` has no rows: add some, or leave it out.")


def _check_stored_images(dataset: AnyDataset, where: str) -> None:
    """Refuses images in the rows of a map-style dataset; the rows of a stream are checked when they are used."""
    if isinstance(dataset, IterableDataset):
        return
    stored = dataset.with_format("arrow")  # no image is decoded
    for name in IMAGE_COLUMNS:
        if name in stored.column_names:
            for table in stored.select_columns([name]).iter(batch_size=100):
                check_no_images({name: table.column(name).to_pylist()}, where)


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
    rows, processes, steps = args.per_device_train_batch_size, args.world_size, args.gradient_accumulation_steps
    needed = rows * processes * steps
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but one generation batch takes {needed} = {rows} per device x "
            f"{processes} processes x {steps} accumulation steps, and rows that do not fill one are dropped, so there "
            "would be 0 steps: add rows, or lower one of those numbers."
        )


def student_limits(student: CausalLM, args: OPSDConfig) -> PromptLimits:
    """Limits of the student's prompts and completions.

    Raises:
        ValueError: A completion does not fit into the student's context.
    """
    context = context_of(student)
    if args.use_vllm and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    limits = PromptLimits(vocabulary=model_shape(student)[0], context=context, completion=args.max_completion_length)
    limits.check_room("the student")
    return limits
