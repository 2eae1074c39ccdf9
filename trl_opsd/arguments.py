"""Checks a trainer's arguments against each other before a model is loaded; `config.py` checks single options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from trl_opsd._compat.peft import CausalLM, is_peft
from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import Rows, look_ahead
from trl_opsd.data.chat_templates import check_template_arguments, warn_of_bare_text
from trl_opsd.data.datasets import AnyDataset, columns_of, describe_rows
from trl_opsd.data.intake import Intake
from trl_opsd.data.prompts import IMAGE_COLUMNS, PromptLimits, check_columns, refuse_images
from trl_opsd.data.row_sharding import check_alike
from trl_opsd.data.survey import has_values
from trl_opsd.data.teacher_prompts import COLUMNS, PRIVILEGED, TEMPLATE, TeacherPrompts, check_prompt_fn
from trl_opsd.models.backbone import context_of
from trl_opsd.models.head import model_shape
from trl_opsd.models.model_checks import check_in_memory, check_own_loss, language_config, same_weights
from trl_opsd.models.processing import check_processing_class, loaded_processing_class, text_tokenizer
from trl_opsd.models.special_tokens import configured_vocabulary, ensure_special_tokens
from trl_opsd.run.without_effect import described, without_effect
from trl_opsd.teacher.teacher_checks import check_named_once, check_teachers, check_tokenizers

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The checked arguments of a trainer; no model is loaded yet."""

    models: dict[str, Any]
    """Teacher models, paths or model ids by name; `None` is the student itself."""
    rows: dict[str, Rows]
    """The datasets by their names in messages."""
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
    quantization_config: Any = None,
) -> Prepared:
    """Runs every check that needs no loaded model; the arguments are the trainer's.

    Raises:
        ValueError: Arguments contradict each other; the message says what to change.
        TypeError: An argument has an unsupported type.
    """
    check_named_once(teacher_model, args)
    teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    check_teachers(teacher_model, model, args)
    models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {"teacher": teacher_model}
    if processing_class is not None:
        check_processing_class(processing_class)
    if teacher_prompt_fn is not None:
        check_prompt_fn(teacher_prompt_fn)
        if args.remove_unused_columns:
            raise ValueError(
                "`remove_unused_columns=True` would hide columns from `teacher_prompt_fn`: leave it at False."
            )
    tells_more = teacher_prompt_fn is not None or bool(args.teacher_template_kwargs)
    several = tuple(models) if len(models) > 1 else ()
    optional = PRIVILEGED if teacher_prompt_fn is None else ()  # a function may read columns of any name
    check_datasets(datasets, args, several, optional, needs_privilege(model, args, teacher_prompt_fn))
    check_models(model, models, args)
    warn_of_template(args, datasets, teacher_prompt_fn is not None)
    if quantization_config is None:
        warn_of_same_model(model, models, args, datasets, tells_more)
    prompts = TeacherPrompts(template=args.teacher_prompt_template, prompt_fn=teacher_prompt_fn)
    intake = Intake(teachers=tuple(models), prompts=prompts)
    rows = surveyed(datasets, args, bool(several))
    for one in rows.values():
        look_ahead(one, intake)
    if args.world_size > 1:
        check_alike(gather_object([{name: describe_rows(one, row_columns) for name, one in datasets.items()}]))
    if processing_class is None:
        processing_class = loaded_processing_class(model, args.model_init_kwargs or {}, args.trust_remote_code)
        check_processing_class(processing_class)
    found = Prepared(models=models, rows=rows, intake=intake, processing_class=processing_class)
    check_template(found, args)
    ensure_special_tokens(found.tokenizer, configured_vocabulary(model, args.model_init_kwargs or {}))
    check_tokenizers(found.tokenizer, models, teacher_processing_class, args)
    return found


def surveyed(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, names_teachers: bool = False
) -> dict[str, Rows]:
    """The datasets that are there, each with the shapes and sizes of its rows.

    Args:
        datasets (`Mapping`):
            By their names in messages.
        args ([`OPSDConfig`]):
            Says whether to show progress bars.
        names_teachers (`bool`, *optional*, defaults to `False`):
            Whether each row names its teacher, and so is of another shape than a row of another teacher.
    """
    columns = [name for name in COLUMNS if names_teachers or name != "teacher"]
    progress = args.process_index == 0 and not args.disable_tqdm
    return {name: Rows.of(one, name, columns, progress) for name, one in datasets.items() if one is not None}


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


def warn_of_options(
    args: OPSDConfig, teachers: Mapping[str, Any], own_rollout: bool, optimizers: tuple[Any, Any], tools: Any
) -> None:
    """Says which options are set and have no effect, or not the whole of it.

    Args:
        args ([`OPSDConfig`]):
            The options.
        teachers (`Mapping[str, Any]`):
            As the user passed them; `None` is the student itself.
        own_rollout (`bool`):
            Whether a rollout was passed.
        optimizers, tools:
            As they were passed.
    """
    found = without_effect(
        args, own_rollout=own_rollout, teachers=list(teachers.values()), optimizers=optimizers, tools=tools
    )
    if found:
        logger.warning(described(args, found))
    if optimizers[1] is None and 0 < args.max_steps < args.warmup_steps:
        logger.warning(
            f"`warmup_steps={args.warmup_steps:g}` with `max_steps={args.max_steps}`: training ends before the rate "
            f"reaches `learning_rate={args.learning_rate}`. Set fewer; below 1, it is a share of all steps."
        )


def check_template(given: Prepared, args: OPSDConfig) -> None:
    """Checks what the chat template is given: its arguments, and whether prompts are meant for it.

    Raises:
        ValueError: The template does not read an argument that the teacher's prompts are to differ in.
    """
    tokenizer = given.tokenizer
    if wrong := check_template_arguments(tokenizer, "teacher_chat_template_kwargs", args.teacher_template_kwargs):
        raise ValueError(wrong)
    if wrong := check_template_arguments(tokenizer, "chat_template_kwargs", args.chat_template_kwargs or {}):
        logger.warning(wrong)
    for rows in given.rows.values():
        some = rows.first_prompts()
        if some and all(isinstance(prompt, str) for prompt in some):
            warn_of_bare_text(tokenizer, rows.where, some)
            break


def needs_privilege(student: Any, args: OPSDConfig, teacher_prompt_fn: Any) -> bool:
    """Whether a column has to give the teacher context, because it starts as the student and reads nothing else.

    Without the adapter it came with, a student is another model.
    """
    kind = args.teacher_model_kind
    is_another = kind is None or (kind == "base" and not isinstance(student, str) and is_peft(student))
    return not (is_another or teacher_prompt_fn is not None or args.teacher_template_kwargs)


def warn_of_same_model(
    student: Any,
    teachers: Mapping[str, Any],
    args: OPSDConfig,
    datasets: Mapping[str, AnyDataset | None],
    tells_more: bool,
) -> None:
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
    """
    if tells_more or _may_have(datasets, PRIVILEGED):
        return
    loading = args.model_init_kwargs or {}
    theirs = {"revision": args.teacher_model_revision, **(args.teacher_model_init_kwargs or {})}
    for teacher in teachers.values():
        if same_weights(student, loading, teacher, theirs):
            logger.warning(
                f"The teacher and the student are the same model, {teacher!r}, and read the same prompts: the "
                "divergence is 0 and stays 0, so nothing is learned. Pass another teacher, or a column "
                "'privileged_context' that only the teacher reads."
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
    if args.teacher_prompt_template == TEMPLATE:
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
    own_code = {"trust_remote_code": args.trust_remote_code}
    config = language_config(student, "model", {**own_code, **(args.model_init_kwargs or {})})
    check_own_loss({**config, **(args.model_init_kwargs or {})})
    check_in_memory(student)
    _check_teacher_models(teachers, args)


def _check_teacher_models(teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    own_code = {"trust_remote_code": args.teacher_trust_remote_code}
    loading = {**own_code, "revision": args.teacher_model_revision, **(args.teacher_model_init_kwargs or {})}
    for name, teacher in teachers.items():
        called = "teacher_model" if len(teachers) == 1 else f"teacher_model[{name!r}]"
        language_config(teacher, called, loading, trust="teacher_trust_remote_code")


def check_other_teacher(
    teacher_model: Any, student: CausalLM, args: OPSDConfig, tokenizer: PreTrainedTokenizerBase, names: Collection[str]
) -> None:
    """Checks a teacher that is to replace the one the trainer was built with, before it is loaded.

    Args:
        teacher_model (`Any`):
            A path, a model id, a model or a [`Teacher`].
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student.
        args ([`OPSDConfig`]):
            The options.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The student's.
        names (`Collection[str]`):
            Names of the teachers there are.

    Raises:
        ValueError: It cannot teach this student, or there is no single teacher to replace.
        TypeError: An object of this type cannot be a teacher.
    """
    if len(names) > 1 or isinstance(teacher_model, Mapping):
        raise ValueError(
            f"`trainer.teacher_model` stands for one teacher, and {len(names)} are there ({', '.join(names)}): pass "
            "several, as a dict, when the trainer is built."
        )
    if teacher_model is None:
        raise ValueError("`trainer.teacher_model = None`: a trainer needs a teacher; assign another model or path.")
    check_teachers(teacher_model, student, args)
    models = {"teacher": teacher_model}
    _check_teacher_models(models, args)
    check_tokenizers(tokenizer, models, None, args)


def check_datasets(
    datasets: Mapping[str, AnyDataset | None],
    args: OPSDConfig,
    teachers: Collection[str] = (),
    optional: Collection[str] = (),
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
        optional (`Collection[str]`, *optional*):
            Columns of which a misspelt one is refused.
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
            raise TypeError(f"`{where}` is {_what_to_pass(dataset, where)}.")
        columns = columns_of(dataset)
        check_columns(columns, where, teachers, optional)
        _check_stored_images(dataset, where)
        if needs_privilege and columns is not None and not set(PRIVILEGED) & set(columns):
            raise ValueError(
                f"The student is its own teacher (`teacher_model_kind={args.teacher_model_kind!r}`), but {where} has "
                f"no context for the teacher that the student does not see; it has only {columns}. Add a column "
                "'privileged_context' or 'teacher_prompt', or pass `teacher_prompt_fn`."
            )
        if where == "train_dataset":
            check_train_size(dataset, args)
        elif isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{where}` has no rows: add some, or leave it out.")


def _what_to_pass(given: Any, where: str) -> str:
    """What was given for a dataset, and what to give instead."""
    kind = type(given).__name__
    if isinstance(given, Mapping) and all(isinstance(part, Dataset | IterableDataset) for part in given.values()):
        some = next((name for name in ("train", "test", "validation") if name in given), next(iter(given), "train"))
        whole = f"; for all of them, `{where}=dict(...)`" if where == "eval_dataset" else ""
        return f"a {kind} of {sorted(given)}: pass one of them, `{where}=...[{some!r}]`{whole}"
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
