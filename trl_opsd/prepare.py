"""The front door: every check of a trainer's arguments that needs no loaded model, in stages from cheap to costly.

`config.py` has checked the options by itself, and checks them again here if they were changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from trl_opsd._compat.peft import has_foreign_adapter, is_peft
from trl_opsd._compat.sharding import launched
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd._compat.trl import chat_template_utils, get_config_model_id
from trl_opsd._compat.urls import ONLY
from trl_opsd._compat.versions import warn_of_untested
from trl_opsd.checkpoints import check_disk, check_folder
from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import COMPLETION, TOKENS, check_completion, recorded, renamed, with_prompts
from trl_opsd.data.datasets import (
    AnyDataset,
    EvalDatasets,
    Rows,
    by_name,
    columns_of,
    describe_rows,
    look_ahead,
    surveyed,
)
from trl_opsd.data.images import IMAGE_COLUMNS, TEACHER_IMAGE_COLUMNS
from trl_opsd.data.prompts import CONTRAST, PREFIX, PRIVILEGED, Intake, check_columns, tells_more
from trl_opsd.data.survey import has_transform
from trl_opsd.data.tokenization import look_at, read_alone
from trl_opsd.environments import Environments
from trl_opsd.environments.environments import EMPTY_PROMPT, as_described
from trl_opsd.losses import divergence_of
from trl_opsd.methods import built
from trl_opsd.methods.base import Method
from trl_opsd.methods.order import check
from trl_opsd.methods.quantization import StudentQuantization
from trl_opsd.methods.rewards import Rewards
from trl_opsd.models.checks import adapter_at, check_in_memory, language_config
from trl_opsd.models.tokenizers import (
    check_processing_class,
    ensure_special_tokens,
    loaded_processing_class,
    text_tokenizer,
)
from trl_opsd.options.rules import check_train_size, prompts_of_step, refuse, shown
from trl_opsd.options.table import check_same_options, shared_options
from trl_opsd.teacher.checks import (
    check_named_once,
    check_teachers,
    check_tokenizers,
    check_up,
    location,
    servers,
    teachers_processors,
    tokenizers_of,
)
from trl_opsd.teacher.stored import stored_teachers


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The checked arguments of a trainer; no model is loaded yet."""

    args: OPSDConfig
    models: dict[str, Any]
    """Teacher models, paths or model ids by name; `None` is the student itself."""
    train_dataset: AnyDataset | None
    eval_dataset: EvalDatasets
    reads_solutions: bool
    """Whether a column `solution` is what only the teacher reads, as it would read nothing else."""
    rows: dict[str, Rows]
    """The datasets, and what is known of their rows, by their names in messages."""
    intake: Intake
    """Parses rows, with the names of these teachers."""
    tokenizer: PreTrainedTokenizerBase
    """The student's."""
    processors: Mapping[str, ProcessorMixin | None]
    """What reads images: the student's processor under an empty name, and those of teachers that have their own."""
    reads_images: bool | None
    """Whether prompts have images; `None` where a stream may have some."""
    row_columns: tuple[str, ...]
    """Columns that are read."""
    rollout: Any
    cross: Any
    """What compares teachers that have tokenizers of their own; else `None`."""
    methods: tuple[Method, ...]
    """In their order, those of the user last."""
    environments: Environments | None
    tools: Sequence[Callable[..., Any]] | None
    """As templates describe them, those of the environments too."""


def prepare(
    *,
    model: Any,
    teacher_model: Any,
    teacher_models: Mapping[Any, Any] | None,
    args: Any,
    train_dataset: Any,
    eval_dataset: Any,
    processing_class: Any,
    teacher_processing_class: Any,
    teacher_prompt_fn: Callable[[dict[str, Any], str], Any] | None,
    divergence: Any,
    rollout: Any,
    methods: Sequence[Method],
    tools: Any,
    environment_factory: Any,
    quantization_config: Any,
    row_columns: Collection[str],
    choose_rollout: Callable[[Any, OPSDConfig], Any],
    choose_cross: Callable[[OPSDConfig], Any],
) -> Prepared:
    """Runs every check that needs no loaded model; `choose_rollout` chooses the rollout.

    `choose_cross` chooses the class of what compares teachers that have tokenizers of their own.
    """
    # 1. The options: what they are, and whether results could be saved.
    if not isinstance(model, str | nn.Module):
        raise TypeError(f"`model` is a {type(model).__name__}: expected a path, a model id, or a model.")
    args = checked_options(args, model)
    objective = divergence_of(divergence, args.beta, args.top_k_teacher)
    args.check_divergence(objective)
    check_folder(args)
    # 2. Environments, and the names of teachers.
    environments = None
    if environment_factory is not None:
        environments = Environments(environment_factory, tools or (), args.environment_timeout)
        if train_dataset is None and args.max_steps > 0 and not environments.are_several:  # which bring their own rows
            train_dataset = Dataset.from_dict({"prompt": [EMPTY_PROMPT] * prompts_of_step(args)})
        tools = environments.tools
    elif isinstance(tools, list | tuple):
        tools = [*map(as_described, tools)]
    if teacher_models is not None:  # as TRL has them
        refuse([(teacher_model is not None, "`teacher_model` with `teacher_models`", "both are teachers; remove one")])
        teacher_model = {str(name): one for name, one in teacher_models.items()}
        teacher_model = teacher_model if len(teacher_model) != 1 else next(iter(teacher_model.values()))
    check_named_once(teacher_model, args)
    teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    if is_stored := args.teacher_targets is not None:
        beside = [one for one in ("teacher_model_name_or_path", "teacher_model_kind") if getattr(args, one) is not None]
        what = shown(args, "teacher_targets", *beside) + " with `teacher_model`" * (not beside)
        why = "the targets of all rows are read from the folder, and no teacher is loaded; remove one of them"
        refuse([(teacher_model is not None or bool(beside), what, why)])
        stored = stored_teachers(args)
        teacher_model = stored if len(stored) > 1 else next(iter(stored.values()))
    # 3. Methods, and what cannot go together.
    made = built(args, methods, teacher_prompt_fn, environments is not None)
    check(args, made, environments, train_dataset is not None)
    if (cross := choose_cross(args)) is not None:
        cross.check(args, objective, made, tools)
    rewards = next((one for one in made if isinstance(one, Rewards)), None)
    acts, evaluates = environments is not None, args.eval_strategy != "no"
    each_begins = "environments are reset when their step begins; remove `overlap`"
    refuse(
        [
            (
                is_stored and (args.lmbda > 0 or args.seq_kd or eval_dataset is not None),
                f"`teacher_targets` with {shown(args, 'lmbda', 'seq_kd')} or an `eval_dataset`",
                "there are targets of completions in the dataset alone; set `lmbda=0`, or pass the teacher instead",
            ),
            (acts and args.overlap == "ahead", f"`environment_factory` with {shown(args, 'overlap')}", each_begins),
            (
                args.remove_unused_columns and (acts or teacher_prompt_fn is not None),
                f"{shown(args, 'remove_unused_columns')} with an environment or `teacher_prompt_fn`",
                "its columns would be hidden from it; set it to False",
            ),
            (
                args.seq_kd and tools,
                f"{shown(args, 'seq_kd')} with tools",
                "tool calls of a teacher are not executed; record its episodes, into a column 'completion'",
            ),
            (
                teacher_prompt_fn is not None and args.seq_kd,
                "`teacher_prompt_fn` with `seq_kd=True`",
                "the function needs a completion, which the teacher is to generate; add a column 'teacher_prompt'",
            ),
            (
                not evaluates and (args.save_strategy == "best" or args.load_best_model_at_end),
                "`save_strategy='best'` or `load_best_model_at_end` without evaluations",
                "there would be no best model; set `eval_strategy`",
            ),
        ]
    )
    # 4. The rollout, the teachers, and functions of the user.
    chosen = choose_rollout(rollout, args)
    if writer := next((type(one).__name__ for one in made if one.writes), None):
        has_turns, blocks = bool(acts or tools), "it cannot generate block by block; generate with `transformers`"
        refuse(
            [
                (has_turns, f"`{writer}` with `tools` or an environment", "it writes one turn; remove one of them"),
                (not chosen.in_blocks, f"`{writer}` with the rollout ({chosen})", blocks),
            ]
        )
    check_teachers(teacher_model, model, args)
    models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {ONLY: teacher_model}
    for method in made:
        method.check(args, tuple(models))
    # 5. Columns: what rows have, and who reads it.
    by_default = EMPTY_PROMPT if acts else None
    train_dataset = with_prompts(train_dataset, "train_dataset", by_default)
    eval_dataset = with_prompts(eval_dataset, "eval_dataset", by_default)
    is_told, is_rewarded = environments is not None and environments.tells, bool(rewards and rewards.context)
    needs_context = _needs_context(model, args, teacher_prompt_fn is not None or is_rewarded)
    needs_column = needs_context and not is_told
    if needs_column:
        train_dataset, eval_dataset = (renamed(one, "privileged_context") for one in (train_dataset, eval_dataset))
    if len(models) > 1:
        train_dataset, eval_dataset = (renamed(one, "teacher") for one in (train_dataset, eval_dataset))
    datasets = {"train_dataset": train_dataset, **by_name(eval_dataset)}
    intake = Intake(
        teachers=tuple(models),
        template=args.teacher_prompt_template,
        prompt_fn=teacher_prompt_fn,
        rewrites=any(one.has("teacher_prompt") for one in made),
        contrasts=any("contrast" in one.reads for one in made),
        environments=environments.names if environments is not None else frozenset(),
        is_told=is_told,
        needs_context=needs_context,
    )
    # A reference beside rewards, or a sharper self, differs from the student without a column.
    differs = args.tempers_apart or any(one.adds_nll or one.moves_target for one in made)
    _check_columns(datasets, args, intake, needs_column and not differs)
    columns = tuple(row_columns)
    if args.lmbda < 1 and not args.seq_kd:
        _check_given({"train_dataset": train_dataset}, COMPLETION)
        columns = (*columns, COMPLETION, TOKENS)
    _check_given(datasets, PREFIX)
    begins, what = PREFIX in (columns_of(train_dataset) or ()), f"{shown(args, 'seq_kd')} with a column {PREFIX!r}"
    refuse([(args.seq_kd and begins, what, "a teacher cannot continue a given beginning; remove one of them")])
    if rewards is not None:
        known = _columns_of_rewards(datasets, args, columns, needs_column)
        rewards.check_rows(known, ("environments",) if acts else (), any(one.needs_rewards for one in made))
    # 6. Models that are found, generate text, and are what they seem.
    quantises = any(isinstance(one, StudentQuantization) for one in made)
    _check_models(model, models, args, quantization_config, quantises)
    # 7. Processes agree.
    if args.world_size > 1:
        # Of paths the last part, as machines may keep models in other places.
        paths = {f"teacher_model[{name!r}]": Path(one).name for name, one in models.items() if isinstance(one, str)}
        of_rows = {name: describe_rows(one, columns) for name, one in datasets.items()}
        described = {**shared_options(args), **paths, "methods": [one.described() for one in made], **of_rows}
        check_same_options(gather_object([described]))
        check_disk(args)
    # 8. Rows, one of each shape.
    rows = {name: look_ahead(one, intake) for name, one in surveyed(datasets, args, intake.names).items()}
    # 9. Tokenizers and processors: who reads images.
    if processing_class is None:
        processing_class = loaded_processing_class(model, args.model_init_kwargs or {}, args.trust_remote_code)
    check_processing_class(processing_class)
    processor = processing_class if isinstance(processing_class, ProcessorMixin) else None
    processors: dict[str, ProcessorMixin | None] = {"": processor}
    seen = [one.has_images for one in rows.values()]
    reads_images = True if any(seen) else None if processor is not None and None in seen else False
    if reads_images is not False:
        processors.update(teachers_processors(processor, models, teacher_processing_class, args))
        intake = replace(intake, processors={name: one and name for name, one in processors.items()})
    if any(seen):
        refuse(
            [
                (args.padding_free, "`padding_free=True` with images", "rows with images are not concatenated"),
                (launched(args).sp_enabled, "`sp_size` with images", "rows with images are not divided"),
                (cross is not None, "Images with a teacher that has a tokenizer of its own", "remove the images"),
            ]
        )
    for one in rows.values():
        if one.has_images:
            look_ahead(one, intake)  # now that it is known who can read them
        if one.student_sees:
            why = "it reads token ids alone; generate with `transformers` or a colocated vLLM"
            refuse([(not chosen.reads_images, f"The rollout ({chosen}) with images", why)])
    # 10. Templates, end tokens and vocabularies.
    tokenizer = text_tokenizer(processing_class)
    first = next(iter(rows.values()))
    if some := first.first_requests(intake):
        look_at(tokenizer, first.where, some, args, tools, are_shared=cross is None)
    config = language_config(model, "model", args.model_init_kwargs or {})
    ensure_special_tokens(tokenizer, config.get("vocab_size"))
    for one in rows.values():
        of_dataset = (COMPLETION,) if COMPLETION in columns and one.where == "train_dataset" else ()
        for column in (PREFIX, *of_dataset):
            _try_first(one, column, intake, tokenizer, args, tools)
    if cross is None:
        check_tokenizers(tokenizer, models, teacher_processing_class, args)
    else:
        found = tokenizers_of(models, teacher_processing_class, args)
        theirs = {name: one for name, (one, _) in found.items() if one is not None}
        if unknown := [name for name in models if name not in theirs]:
            raise ValueError(f"The tokenizer of the {unknown[0]} is not known: pass it as `teacher_processing_class`.")
        requests = [one for some in rows.values() for one in some.first_requests(intake)]
        texts = [text for one in requests for prompt in (one.student, one.of_teacher) for text in prompt.texts]
        cross = cross(args, tokenizer, theirs, texts)
    # 11. Servers, which may take minutes to start.
    check_up(args)
    return Prepared(
        args=args,
        models=models,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        reads_solutions=needs_column,
        rows=rows,
        intake=intake,
        tokenizer=tokenizer,
        processors=processors,
        reads_images=reads_images,
        row_columns=columns,
        rollout=chosen,
        cross=cross,
        methods=made,
        environments=environments,
        tools=tools,
    )


def checked_options(args: Any, model: Any) -> OPSDConfig:
    """The options, checked again, or the defaults with an output folder named after the student."""
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = OPSDConfig(f"{name.split('/')[-1]}-OPSD")
    if not isinstance(args, OPSDConfig):
        remedy = "; it is the third argument, after the teacher" if not isinstance(args, TrainingArguments) else ""
        raise TypeError(f"`args` is a {type(args).__name__}: expected a `trl_opsd.OPSDConfig`{remedy}.")
    args.check_again()
    warn_of_untested()
    return args


def _needs_context(student: Any, args: OPSDConfig, is_told: bool) -> bool:
    """Whether a column has to give the teacher context, because it starts as the student and reads nothing else."""
    kind = args.teacher_model_kind  # without the adapter it came with, a student is another model
    is_another = kind is None or (kind == "base" and not isinstance(student, str) and is_peft(student))
    return not (is_another or is_told or args.teacher_template_kwargs)


def _check_columns(
    datasets: Mapping[str, AnyDataset | None], args: OPSDConfig, intake: Intake, needs_privilege: bool
) -> None:
    """Checks types, columns and sizes; rows are read later. With `needs_privilege`, a column has to give context."""
    contrast = CONTRAST if intake.contrasts else ()
    # A function may read columns of any name.
    optional = () if intake.prompt_fn else (PREFIX, *PRIVILEGED, *contrast, *IMAGE_COLUMNS, *TEACHER_IMAGE_COLUMNS)
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
        check_columns(columns, where, optional)
        has_context = columns is None or tells_more(columns)
        refuse(
            [
                (
                    needs_privilege and not intake.rewrites and not has_context,
                    f"{shown(args, 'teacher_model_kind')}, so that the student is its own teacher, and {where} with "
                    f"only {columns}",
                    "add a column 'privileged_context', 'teacher_prompt' or 'teacher_images', pass "
                    "`teacher_prompt_fn` or a method, or set `teacher_temperature`",
                ),
                (
                    intake.is_told and columns is not None and has_context,
                    f"{where}, with the columns {columns}, and an environment that gives the teacher context",
                    "rename the column, so that `reset` gets it, or remove `get_privileged_context` and `get_feedback`",
                ),
                (isinstance(dataset, Dataset) and len(dataset) == 0, f"`{where}` is empty", "add rows, or remove it"),
            ]
        )
        if where == "train_dataset":
            check_train_size(dataset, args)


def _check_given(datasets: Mapping[str, AnyDataset | None], column: str) -> None:
    """Checks completions, or their beginnings, as far as they can be read ahead."""
    for where, dataset in datasets.items():
        columns = columns_of(dataset)
        if column == COMPLETION and columns is not None and column not in columns:
            check_completion({}, where)
        if isinstance(dataset, Dataset) and column in dataset.column_names and not has_transform(dataset):
            for number, row in enumerate(dataset.with_format(None).select_columns(["prompt", column])):
                if row[column] is not None or column == COMPLETION:
                    check_completion(row, f"row {number} of {where}", column)


def _try_first(
    rows: Rows, column: str, intake: Intake, tokenizer: PreTrainedTokenizerBase, args: OPSDConfig, tools: Any
) -> None:
    """Tokenizes the first completion of a dataset, or beginning of one, which the chat template may not allow."""
    if not rows.can_be_read_ahead or column not in rows.dataset.column_names:
        return
    dataset = rows.dataset.with_format(None)
    number = next((number for number, one in enumerate(dataset[column]) if one is not None), None)
    cannot_call = tools and not chat_template_utils.supports_tool_calling(tokenizer)  # which TRL refuses
    if number is None or rows.has_images or cannot_call:
        return
    request = intake.read(dataset[number], f"row {number} of {rows.where}")
    prompt, template = request.student, {**(args.chat_template_kwargs or {}), "tools": tools or None}
    if tools and not chat_template_utils.is_chat_template_prefix_preserving(tokenizer):  # as TRL chooses it
        template["chat_template"] = chat_template_utils.get_training_chat_template(processing_class=tokenizer)
    with prompt.named():
        (ids,) = read_alone(tokenizer, [prompt.value], prompt.kind, {**template, **prompt.template})
    recorded(request, request.where, column, prompt.value, ids, tokenizer, template, [tokenizer.eos_token_id])


def _columns_of_rewards(
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


def _check_models(
    student: Any, teachers: Mapping[str, Any], args: OPSDConfig, quantization_config: Any, quantises: bool
) -> None:
    """Refuses models that cannot be found or are no causal language models; a user's own [`Teacher`] is not checked."""
    loading = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    config = {"quantization_config": quantization_config, **language_config(student, "model", loading), **loading}
    check_in_memory(student, args.device)
    is_model = isinstance(student, nn.Module)
    refuse(
        [
            (
                quantises and config["quantization_config"] is not None,
                "`StudentQuantization` with a student that is quantised already (`quantization_config`)",
                "pass the model that it was made of, or remove one of them",
            ),
            (
                not quantises and is_model and fake_quantized(student),
                "`model` computes with the quantised weights of an earlier training",
                "pass `StudentQuantization` again, or load the model anew",
            ),
            # PEFT puts an adapter into the layers of the model it is given: another one would join it.
            (
                is_model and has_foreign_adapter(student),
                "`model` still contains the adapter of an earlier trainer",
                "call `model = trainer.model.unload()` of that trainer, or load it anew; to train the adapter further, "
                "pass `trainer.model` without a `peft_config`",
            ),
        ]
    )
    for name, teacher in teachers.items():
        called = "teacher_model" if len(teachers) == 1 else f"teacher_model[{name!r}]"
        if (adapter := adapter_at(teacher, location(args))) is None:
            language_config(teacher, called, location(args))
            continue
        adapter.check(called)
        is_away = args.teacher_offload == "zero3" or not {name, ONLY}.isdisjoint(servers(args))
        why = "pass a merged model, or set `teacher_offload='stream'` without a server"
        refuse([(is_away, f"`{called}`, an adapter, on a server or with `teacher_offload='zero3'`", why)])
