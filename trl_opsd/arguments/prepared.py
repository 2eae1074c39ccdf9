"""Every check of a trainer's arguments that needs no loaded model, in one call, by what it costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from trl_opsd._compat.trl import DistillationConfig, get_config_model_id
from trl_opsd._compat.versions import warn_of_outside
from trl_opsd.arguments.checks import (
    check_acted,
    check_completions,
    check_datasets,
    check_models,
    check_template,
    columns_of_rewards,
    looked_through,
    needs_privilege,
    warn_of_same_model,
)
from trl_opsd.arguments.rules import BUILDING, GENERATING_SEEN, LEARNING, SEEING, STORED, SURPRISES, UNSEEN
from trl_opsd.checkpoints import check_disk, check_folder
from trl_opsd.config import OPSDConfig
from trl_opsd.data.byte_vocabulary import ByteVocabulary
from trl_opsd.data.completions import COMPLETION, TOKENS, solutions_as_context, with_prompts
from trl_opsd.data.datasets import AnyDataset, EvalDatasets, Rows, by_name, look_ahead
from trl_opsd.data.prompts import Intake
from trl_opsd.environments import Environments
from trl_opsd.environments.environments import EMPTY_PROMPT, as_described
from trl_opsd.losses import Divergence
from trl_opsd.losses.registry import divergence_of
from trl_opsd.methods import built
from trl_opsd.methods.base import Method
from trl_opsd.methods.order import check
from trl_opsd.methods.quantization import StudentQuantization
from trl_opsd.methods.rewards import Rewards
from trl_opsd.models.tokenizers import (
    check_processing_class,
    check_sees,
    configured_vocabulary,
    ensure_special_tokens,
    loaded_processing_class,
    text_tokenizer,
)
from trl_opsd.options.rules import prompts_of_step, refuse
from trl_opsd.options.table import (
    Situation,
    check_same_options,
    shared_options,
)
from trl_opsd.teacher.checks import (
    check_named_once,
    check_teachers,
    check_tokenizers,
    check_up,
    teachers_processors,
    tokenizers_of,
)
from trl_opsd.teacher.stored import stored_teachers

logger = get_logger(__name__)


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
    processing_class: Any
    processors: Mapping[str, ProcessorMixin | None]
    """What reads images: the student's processor under an empty name, and those of teachers that have their own."""
    reads_images: bool | None
    """Whether prompts have images; `None` where a stream may have some."""
    row_columns: tuple[str, ...]
    """Columns that are read."""
    rollout: Any
    vocabularies: Mapping[str, ByteVocabulary]
    """What tokens stand for, with `cross_tokenizer`: those of the student under an empty name, and of each teacher."""
    methods: tuple[Method, ...]
    """In their order, those of the user last."""
    environments: Environments | None
    tools: Sequence[Callable[..., Any]] | None
    """As templates describe them, those of the environments too."""
    is_same_model: bool
    """Whether it was said that a teacher is the student, and reads nothing more."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return text_tokenizer(self.processing_class)


def prepared(
    *,
    model: Any,
    teacher_model: Any,
    args: Any,
    train_dataset: Any,
    eval_dataset: Any,
    processing_class: Any,
    teacher_processing_class: Any,
    teacher_prompt_fn: Callable[[dict[str, Any], str], Any] | None,
    divergence: Any,
    rollout: Any,
    methods: Sequence[Method],
    optimizers: Any,
    tools: Any,
    environment_factory: Any,
    quantization_config: Any,
    peft_config: Any,
    row_columns: Collection[str],
    pick: Callable[[Any, OPSDConfig], Any],
) -> Prepared:
    """Runs every check that needs no loaded model."""
    # 1. Types, and the options by themselves.
    _check_kinds(model, optimizers, peft_config)
    args = checked_args(args, model, divergence)
    check_folder(args)
    # 2. Options together with the other arguments, and the methods that these ask for.
    environments = None
    if environment_factory is not None:
        environments = _environments(environment_factory, tools, args, train_dataset, eval_dataset)
        if train_dataset is None and args.max_steps > 0 and not environments.are_several:
            train_dataset = _rows_of_step(args)
    # Targets on disk alone name their teachers, which rules and methods read.
    check_named_once(teacher_model, args)
    teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    is_stored = args.teacher_targets is not None and teacher_model is None and args.teacher_model_kind is None
    if is_stored:
        stored = stored_teachers(args)
        teacher_model = stored if len(stored) > 1 else next(iter(stored.values()))
    methods = built(args, methods, teacher_prompt_fn, environments is not None)
    check(args, methods, environments, train_dataset is not None)
    rewards = next((one for one in methods if isinstance(one, Rewards)), None)
    now = Situation(
        args=args,
        teacher_names=tuple(teacher_model) if isinstance(teacher_model, Mapping) else (),
        optimizers=optimizers,
        tools=_described(tools) if environments is None else environments.tools,
        environments=environments,
        objective=divergence,
        rewards=[] if rewards is None else rewards.names,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        teacher_prompt_fn=teacher_prompt_fn,
        row_columns=tuple(row_columns),
    )
    refuse((*(() if train_dataset is None else LEARNING), *BUILDING), now)
    # 3. The rollout, the teachers, and functions of the user.
    picked = pick(rollout, args)
    refuse(STORED if is_stored else (), now)
    check_teachers(teacher_model, model, args)
    models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {"teacher": teacher_model}
    for method in methods:
        method.check(args, tuple(models))
    if processing_class is not None:
        check_processing_class(processing_class)
    # 4. Columns: what rows have, and who reads it.
    by_default = None if environments is None else EMPTY_PROMPT
    train_dataset = with_prompts(train_dataset, "train_dataset", by_default)
    eval_dataset = with_prompts(eval_dataset, "eval_dataset", by_default)
    is_rewarded = rewards is not None and rewards.context is not None
    needs_context = needs_privilege(model, args, teacher_prompt_fn is not None or is_rewarded)
    is_told = environments is not None and environments.tells
    if needs_context and not is_told:
        train_dataset, eval_dataset = solutions_as_context(train_dataset), solutions_as_context(eval_dataset)
    datasets = {"train_dataset": train_dataset, **by_name(eval_dataset)}
    intake = Intake(
        teachers=tuple(models),
        template=args.teacher_prompt_template,
        prompt_fn=teacher_prompt_fn,
        rewrites=any(one.has("teacher_prompt") for one in methods),
        contrasts=any("contrast" in one.reads for one in methods),
        environments=frozenset() if environments is None else environments.names,
        is_told=is_told,
        needs_context=needs_context,
    )
    needs_context = needs_context and not is_told
    # a reference beside rewards, or a sharper self, differs from the student without a column
    differs = args.tempers_apart or any(one.pulls or one.moves_target for one in methods)
    check_datasets(datasets, args, intake, needs_context and not differs)
    more = check_acted(datasets, environments)
    quantises = any(isinstance(one, StudentQuantization) for one in methods)
    check_models(model, models, args, quantization_config, quantises)
    refuse(SURPRISES, now, logger.warning)
    tells_more = intake.rewrites or bool(args.teacher_template_kwargs) or is_told
    is_quantised = quantization_config is not None or quantises
    is_same_model = not is_quantised and not differs and warn_of_same_model(model, models, args, datasets, tells_more)
    # 5. Processes agree.
    if args.world_size > 1:
        check_same_options(gather_object([{**_named(args, models), "methods": [one.described() for one in methods]}]))
        check_disk(args)
    # 6. Rows, each of them.
    row_columns = tuple(row_columns)
    if args.lmbda < 1:
        check_completions(train_dataset, now.tools, not args.seq_kd)
        row_columns = row_columns if args.seq_kd else (*row_columns, COMPLETION, TOKENS)
    if rewards is not None:
        columns = columns_of_rewards(datasets, args, row_columns, needs_context)
        rewards.check_rows(columns, more, any(one.needs_rewards for one in methods))
    rows = looked_through(datasets, args, intake, row_columns)
    # 7. Tokenizers and processors: who reads images.
    if processing_class is None:
        processing_class = loaded_processing_class(model, args.model_init_kwargs or {}, args.trust_remote_code)
        check_processing_class(processing_class)
    processor = processing_class if isinstance(processing_class, ProcessorMixin) else None
    refuse(UNSEEN if processor is not None else (), now, logger.warning)
    processors: dict[str, ProcessorMixin | None] = {"": processor}
    seen = [one.has_images for one in rows.values()]
    reads_images = True if any(seen) else None if processor is not None and None in seen else False
    if reads_images is not False:
        processors.update(teachers_processors(processor, models, teacher_processing_class, args))
        intake = replace(intake, processors={name: one and name for name, one in processors.items()})
    for one in rows.values():
        if one.has_images:
            refuse(SEEING, now)
            look_ahead(one, intake)  # now that it is known who can read them
        if one.student_sees:
            refuse(GENERATING_SEEN, replace(now, rollout=picked))
            check_sees(model, args.model_init_kwargs or {})
    found = Prepared(
        args=args,
        models=models,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        reads_solutions=needs_context,
        rows=rows,
        intake=intake,
        processing_class=processing_class,
        processors=processors,
        reads_images=reads_images,
        row_columns=row_columns,
        rollout=picked,
        vocabularies=_vocabularies(
            text_tokenizer(processing_class), models, teacher_processing_class, args, rows, intake
        ),
        methods=methods,
        environments=environments,
        tools=now.tools,
        is_same_model=is_same_model,
    )
    # 8. Templates, end tokens, vocabularies, and servers that have to be up.
    check_template(found.tokenizer, rows, args, now.tools, intake)
    ensure_special_tokens(found.tokenizer, configured_vocabulary(model, args.model_init_kwargs or {}))
    if not found.vocabularies:
        check_tokenizers(found.tokenizer, models, teacher_processing_class, args)
    check_up(args)
    return found


def _vocabularies(
    tokenizer: PreTrainedTokenizerBase,
    models: Mapping[str, Any],
    given: Any,
    args: OPSDConfig,
    rows: Mapping[str, Rows],
    intake: Intake,
) -> dict[str, ByteVocabulary]:
    """What the tokens of student and teachers stand for, proved on the texts of the first rows."""
    if args.cross_tokenizer is None:
        return {}
    requests = [one for some in rows.values() for one in some.first_requests(intake)]
    texts = [text for one in requests for prompt in (one.student, one.of_teacher) for text in prompt.texts]
    found = {"": ByteVocabulary.of(tokenizer, "the student's tokenizer", texts)}
    for name, (theirs, _) in tokenizers_of(models, given, args).items():
        if theirs is None:
            raise ValueError(
                f"`cross_tokenizer='bytes'`: the tokenizer of the {name} is not known: pass it as "
                "`teacher_processing_class`."
            )
        found[name] = ByteVocabulary.of(text_tokenizer(theirs), f"the tokenizer of the {name}", texts)
    return found


def _described(tools: Any) -> Any:
    return [*map(as_described, tools)] if isinstance(tools, list | tuple) else tools


def _environments(factory: Any, tools: Any, args: OPSDConfig, train_dataset: Any, eval_dataset: Any) -> Environments:
    """The environments of a factory, of each one instance."""
    if train_dataset is None and eval_dataset is None and (isinstance(factory, Mapping) or args.max_steps <= 0):
        lacking = "several environments, one named in each row" if isinstance(factory, Mapping) else "`max_steps`"
        raise ValueError(
            f"`train_dataset` is None with `environment_factory`, which needs {lacking}: pass a dataset, or one "
            "environment and `max_steps`."
        )
    return Environments(factory, tools or (), args.environment_timeout)


def _rows_of_step(args: OPSDConfig) -> Dataset:
    """Rows without content for the prompts of a step: environments bring their own."""
    return Dataset.from_dict({"prompt": [EMPTY_PROMPT] * prompts_of_step(args)})


def _named(args: OPSDConfig, models: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how the student is trained; of paths the last part, as machines may keep models in other places."""
    paths = {f"teacher_model[{name!r}]": Path(one).name for name, one in models.items() if isinstance(one, str)}
    return {**shared_options(args), **paths}


def _check_kinds(model: Any, optimizers: Any, peft_config: Any) -> None:
    kind = type(model).__name__
    is_compiled = kind == "OptimizedModule"  # of `torch.compile`; importing its module takes seconds
    if is_compiled or isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise TypeError(f"`model` is a {kind} around a model: pass the unwrapped model; the trainer wraps it.")
    if not isinstance(model, str | nn.Module):
        raise TypeError(f"`model` is a {kind}: expected a path, a model id, a `PreTrainedModel` or a `PeftModel`.")
    is_pair = isinstance(optimizers, tuple | list) and len(optimizers) == 2
    if not is_pair or isinstance(optimizers[0], type | LRScheduler) or isinstance(optimizers[1], type | Optimizer):
        raise TypeError(
            "`optimizers`: expected a tuple of an optimizer and a scheduler, `(optimizer, None)` for the default "
            "scheduler; to choose an optimizer by name, set `optim` in `OPSDConfig`."
        )
    if (task := getattr(peft_config, "task_type", None)) not in (None, "CAUSAL_LM"):
        raise ValueError(f"`peft_config.task_type` is {task}: the student is a causal language model, 'CAUSAL_LM'.")


def checked_args(args: DistillationConfig | None, model: Any, divergence: Divergence | str | None) -> OPSDConfig:
    """The options, checked again, or the defaults with an output folder named after the student."""
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = OPSDConfig(f"{name.split('/')[-1]}-OPSD")
    if not isinstance(args, OPSDConfig):
        remedy = "; it is the third argument, after the teacher" if not isinstance(args, TrainingArguments) else ""
        raise TypeError(f"`args` is a {type(args).__name__}: expected a `trl_opsd.OPSDConfig`{remedy}.")
    args.check_again()
    args.check_divergence(divergence_of(divergence, args.beta, args.top_k_teacher))
    warn_of_outside()
    return args
