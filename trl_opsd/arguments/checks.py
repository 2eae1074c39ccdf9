"""Checks models, datasets, rewards and chat templates before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.peft import CausalLM, has_foreign_adapter, is_peft
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import COMPLETION, check_completion
from trl_opsd.data.datasets import AnyDataset, Rows, check_alike, columns_of, describe_rows, look_ahead
from trl_opsd.data.images import IMAGE_COLUMNS, TEACHER_IMAGE_COLUMNS
from trl_opsd.data.prompts import COLUMNS, CONTRAST, PRIVILEGED, Intake, Request, check_columns, tells_more
from trl_opsd.data.readers import PromptLimits
from trl_opsd.data.survey import has_transform
from trl_opsd.data.tokenization import (
    check_template_arguments,
    check_that_all_is_read,
    warn_of_ended_text,
    warn_of_prompts,
)
from trl_opsd.environments import Environments
from trl_opsd.http.urls import ONLY
from trl_opsd.models.adapters import adapter_at
from trl_opsd.models.backbone import context_of, model_shape
from trl_opsd.models.checks import (
    check_in_memory,
    check_own_loss,
    language_config,
    same_weights,
)
from trl_opsd.options.rules import batch_in_words, prompts_of_step
from trl_opsd.teacher.checks import location, servers, teacher_loading

logger = get_logger(__name__)


# ---- Models ---------------------------------------------------------------------------------------------------------


def check_models(
    student: Any, teachers: Mapping[str, Any], args: OPSDConfig, quantization_config: Any, quantises: bool
) -> None:
    """Refuses models that cannot be found or are no causal language models; a user's own [`Teacher`] is not checked."""
    loading = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    config = {"quantization_config": quantization_config, **language_config(student, "model", loading), **loading}
    check_own_loss(config)
    if quantises and config["quantization_config"] is not None:
        raise ValueError(
            "`StudentQuantization` with a student that is quantised already (`quantization_config`): pass the model "
            "that it was made of, or remove one of them."
        )
    if not quantises and isinstance(student, nn.Module) and fake_quantized(student):
        raise ValueError(
            "`model` computes with the quantised weights of an earlier training: pass `StudentQuantization` again, or "
            "load the model anew."
        )
    check_in_memory(student, args.device)
    _check_no_foreign_adapter(student, teachers)
    _check_teacher_models(teachers, args)


def _check_no_foreign_adapter(student: Any, teachers: Mapping[str, Any]) -> None:
    """Refuses a student in whose layers the adapter of an earlier trainer is left, and warns of such a teacher."""
    # PEFT puts an adapter into the layers of the model it is given: another one would join it, and without another one
    # only what is left would be trained.
    if isinstance(student, nn.Module) and has_foreign_adapter(student):
        raise ValueError(
            "`model` still contains the adapter of an earlier trainer, which PEFT added to its layers: remove it with "
            "`model = trainer.model.unload()` of that trainer (`merge_and_unload()` keeps what it learned), or reload "
            "the model; to train that adapter further, pass `trainer.model` without a `peft_config`."
        )
    for teacher in teachers.values():
        if isinstance(teacher, nn.Module) and has_foreign_adapter(teacher):
            logger.warning(
                f"The teacher, a {type(teacher).__name__}, still contains the adapter of an earlier trainer and "
                "teaches with it: if this is not intended, call `trainer.model.unload()` of that trainer, or reload "
                "the teacher."
            )


def _check_teacher_models(teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    for name, teacher in teachers.items():
        called = "teacher_model" if len(teachers) == 1 else f"teacher_model[{name!r}]"
        trust = "teacher_trust_remote_code"
        if (adapter := adapter_at(teacher, location(args))) is None:
            language_config(teacher, called, location(args), trust)
            continue
        adapter.check(called, trust)
        if args.teacher_offload == "zero3" or name in (served := servers(args)) or ONLY in served:
            option = "teacher_offload='zero3'" if args.teacher_offload == "zero3" else "teacher_server_url"
            raise ValueError(
                f"`{option}` with an adapter, `{called}={teacher!r}`: it is not supported. Pass a merged model, or set "
                "`teacher_offload='stream'` without a server."
            )


def student_limits(student: CausalLM, args: OPSDConfig) -> PromptLimits:
    """Limits of the student's prompts and completions."""
    context = context_of(student)
    if args.has_engine and args.vllm_max_model_length is not None:
        context = min(args.vllm_max_model_length, context or args.vllm_max_model_length)
    limits = PromptLimits(vocabulary=model_shape(student)[0], context=context, completion=args.max_completion_length)
    limits.check_room()
    return limits


def warn_of_same_model(
    student: Any,
    teachers: Mapping[str, Any],
    args: OPSDConfig,
    datasets: Mapping[str, AnyDataset | None],
    tells_more: bool,
) -> bool:
    """Warns of a teacher that is the student and reads nothing more: the divergence is 0, and stays 0."""
    if tells_more or may_have(datasets, (*PRIVILEGED, *TEACHER_IMAGE_COLUMNS)):
        return False
    loading = args.model_init_kwargs or {}
    theirs = teacher_loading(args)
    same = [teacher for teacher in teachers.values() if same_weights(student, loading, teacher, theirs)]
    if len(teachers) > 1:  # for the rows of one, the student is held where it was
        return False
    for teacher in same:
        logger.warning(
            f"Teacher and student are the same model, {teacher!r}, with the same prompts: the divergence is 0 and "
            "stays 0, so nothing is learned. Pass another teacher, or a column 'privileged_context' that only the "
            "teacher sees."
        )
    return bool(same)


def may_have(datasets: Mapping[str, AnyDataset | None], names: Collection[str]) -> bool:
    """Whether a dataset has one of these columns, or has columns that are not known."""
    columns = [columns_of(one) for one in datasets.values() if one is not None]
    return any(one is None or not set(names).isdisjoint(one) for one in columns)


# ---- Rewards --------------------------------------------------------------------------------------------------------


def columns_of_rewards(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, row_columns: Collection[str], reads_solutions: bool
) -> dict[str, Collection[str] | None]:
    """The columns of each dataset that reward functions get, `None` where they are not known."""
    known: dict[str, Collection[str] | None] = {}
    for where, dataset in datasets.items():
        if dataset is None:
            continue
        columns = columns_of(dataset)
        if columns is not None:
            seen = {one for one in columns if one in row_columns or not args.remove_unused_columns}
            columns = [*seen, *(("solution",) if reads_solutions and "privileged_context" in seen else ())]
        known[where] = columns
    return known


# ---- Chat templates -------------------------------------------------------------------------------------------------


def check_template(
    tokenizer: PreTrainedTokenizerBase, datasets: Mapping[str, Rows], args: OPSDConfig, tools: Any, intake: Intake
) -> None:
    """Checks what the chat template is given: its arguments, and whether prompts are meant for it."""
    of_teachers = {} if args.cross_tokenizer else args.teacher_template_kwargs
    if wrong := check_template_arguments(tokenizer, "teacher_chat_template_kwargs", of_teachers):
        raise ValueError(wrong)
    if wrong := check_template_arguments(tokenizer, "chat_template_kwargs", args.chat_template_kwargs or {}):
        logger.warning(wrong)
    rows = next(iter(datasets.values()))
    if some := rows.first_requests(intake):
        look_at(tokenizer, rows.where, some, args, tools)


def look_at(
    tokenizer: PreTrainedTokenizerBase, where: str, rows: Sequence[Request], args: OPSDConfig, tools: Any
) -> None:
    """Refuses a template that leaves out messages of some rows, and warns of what is seldom meant in their prompts."""
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        tools=tools or None,
        **{"add_generation_prompt": True, **(args.chat_template_kwargs or {})},
    )
    warn_of_prompts(tokenizer, where, [row.student.value for row in rows], render)
    if tools and (text := next((row.student.where for row in rows if row.student.kind == "text"), "")):
        raise ValueError(f"{text} is text, in which no tool can be called: give messages, or remove the tools.")
    for row in rows if tokenizer.chat_template else ():
        theirs_too = ((row.of_teacher, partial(render, **args.teacher_template_kwargs)),)
        for prompt, read in ((row.student, render), *(() if args.cross_tokenizer else theirs_too)):
            if prompt.kind == "messages":
                check_that_all_is_read(prompt.value, read, prompt.where)
    theirs = (row.of_teacher for row in rows if row.of_teacher is not row.student)
    warn_of_ended_text(tokenizer, {one.where: one.value for one in theirs if one.kind == "text"}, render)


# ---- Datasets -------------------------------------------------------------------------------------------------------


def surveyed(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, names: Collection[str] = ()
) -> dict[str, Rows]:
    """The datasets that are there, each with the shapes and sizes of its rows, by what rows name in these columns."""
    columns = [name for name in COLUMNS if name != "teacher"] + [*names]
    progress = args.process_index == 0 and not args.disable_tqdm
    return {name: Rows.of(one, name, columns, progress) for name, one in datasets.items() if one is not None}


def looked_through(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, intake: Intake, columns: Collection[str]
) -> dict[str, Rows]:
    """The datasets that are there, surveyed, after the checks of their rows that need no tokenizer. Collective."""
    rows = surveyed(datasets, args, intake.names)
    rows = {name: look_ahead(one, intake) for name, one in rows.items()}
    if args.world_size > 1:
        check_alike(gather_object([{name: describe_rows(one, columns) for name, one in datasets.items()}]))
    return rows


def check_datasets(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, intake: Intake, needs_privilege: bool
) -> None:
    """Checks types, columns and sizes; rows are read later. With `needs_privilege`, a column has to give context."""
    teachers = intake.teachers if len(intake.teachers) > 1 else ()
    # A function may read columns of any name.
    contrast = CONTRAST if intake.contrasts else ()
    optional = () if intake.prompt_fn else (*PRIVILEGED, *contrast, *IMAGE_COLUMNS, *TEACHER_IMAGE_COLUMNS)
    if datasets.keys() == {"train_dataset", "eval_dataset"} and not any(one is not None for one in datasets.values()):
        raise ValueError("`train_dataset` is None: pass a dataset with a column 'prompt'.")
    for where, dataset in datasets.items():
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(
                f"`{where}` is a {type(dataset).__name__}: expected a `datasets.Dataset` or `IterableDataset`, for "
                "instance `load_dataset(...)['train']` or `Dataset.from_list(rows)`."
            )
        columns = columns_of(dataset)
        check_columns(columns, where, teachers, optional)
        if needs_privilege and not intake.rewrites and columns is not None and not tells_more(columns):
            raise ValueError(
                f"The student is its own teacher (`teacher_model_kind={args.teacher_model_kind!r}`), but {where} has "
                f"no context for the teacher that the student does not see; it has only {columns}. Add a column "
                "'privileged_context', 'teacher_prompt' or 'teacher_images', or pass `teacher_prompt_fn` or a method; "
                "or set `teacher_temperature`."
            )
        if where == "train_dataset":
            check_train_size(dataset, args)
        elif isinstance(dataset, Dataset) and len(dataset) == 0:
            raise ValueError(f"`{where}` is empty: add rows, or remove it.")


def check_acted(datasets: Mapping[str, AnyDataset | None], environments: Environments | None) -> tuple[str, ...]:
    """Checks columns beside environments; returns what reward functions get besides."""
    if environments is None:
        return ()
    names, is_told = environments.names, environments.tells
    for where, dataset in datasets.items():
        columns = columns_of(dataset) if dataset is not None else None
        if columns is None:
            continue
        if names and "environment" not in columns:
            raise ValueError(
                f"{where} has no column 'environment', which names one of {sorted(names)} for each row: add it, or "
                "pass a single environment as `environment_factory`."
            )
        if is_told and tells_more(columns):
            raise ValueError(
                f"Both {where}, with the columns {columns}, and the environment tell what only the teacher reads: "
                "remove the column, and give it to `reset`, or remove `get_privileged_context` and `get_feedback`."
            )
    return ("environments",)


def check_completions(dataset: AnyDataset | None, tools: Any, from_dataset: bool) -> None:
    """Checks the completions that `lmbda` below 1 learns from, as far as they can be read ahead."""
    if tools:
        raise ValueError("`lmbda` below 1 with `tools`: completions in the dataset make no tool calls: set `lmbda=1`.")
    if dataset is None or not from_dataset:
        return
    columns = columns_of(dataset)
    if columns is not None and COMPLETION not in columns:
        raise ValueError(
            f"`lmbda` below 1 trains on a column 'completion', but train_dataset has only {columns}: add it, or set "
            "`lmbda=1`."
        )
    if isinstance(dataset, Dataset) and not has_transform(dataset):
        for number, row in enumerate(dataset.with_format(None).select_columns(["prompt", COMPLETION])):
            check_completion(row, f"row {number} of train_dataset")


def needs_privilege(student: Any, args: OPSDConfig, is_told: bool) -> bool:
    """Whether a column has to give the teacher context, because it starts as the student and reads nothing else."""
    kind = args.teacher_model_kind  # without the adapter it came with, a student is another model
    is_another = kind is None or (kind == "base" and not isinstance(student, str) and is_peft(student))
    return not (is_another or is_told or args.teacher_template_kwargs)


def check_train_size(dataset: AnyDataset, args: OPSDConfig) -> None:
    """Refuses a dataset that does not fill one generation batch, and a stream without `max_steps`."""
    if isinstance(dataset, IterableDataset) and args.max_steps <= 0:
        raise ValueError(
            f"`max_steps={args.max_steps}`: `train_dataset` is a stream of unknown length: set `max_steps` to the "
            "number of optimizer steps."
        )
    if isinstance(dataset, Dataset) and len(dataset) < prompts_of_step(args):
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, but one generation batch needs {batch_in_words(args)}, and "
            "incomplete batches are dropped, so there would be 0 steps: add rows, or lower one of those numbers."
        )
