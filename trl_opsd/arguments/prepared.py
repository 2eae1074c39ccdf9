"""Every check of a trainer's arguments that needs no loaded model, in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback, TrainingArguments

from trl_opsd import fingerprint
from trl_opsd._compat.trl import DistillationConfig, get_config_model_id
from trl_opsd._compat.versions import warn_of_outside
from trl_opsd.arguments.checks import (
    check_completions,
    check_datasets,
    check_models,
    check_rows_of_rewards,
    check_template,
    looked_through,
    may_have,
    needs_privilege,
    warn_of_same_model,
)
from trl_opsd.arguments.rules import BUILDING, LEARNING, SURPRISES
from trl_opsd.checkpoints.atomic_save import check_disk
from trl_opsd.config import OPSDConfig
from trl_opsd.data.completions import COMPLETION, solutions_as_context, with_prompts
from trl_opsd.data.datasets import AnyDataset, EvalDatasets, Rows, by_name
from trl_opsd.data.prompts import PRIVILEGED, TeacherPrompts, check_prompt_fn
from trl_opsd.data.readers import Intake
from trl_opsd.losses import Divergence
from trl_opsd.models.tokenizers import (
    check_processing_class,
    configured_vocabulary,
    ensure_special_tokens,
    loaded_processing_class,
    text_tokenizer,
)
from trl_opsd.options.rules import refuse
from trl_opsd.options.table import (
    Situation,
    a_divergence,
    check_same_options,
    shared_options,
    without_effect,
    without_effect_in_words,
)
from trl_opsd.rewards.given import Given, given_rewards
from trl_opsd.teacher.checks import check_named_once, check_teachers, check_tokenizers, check_up


def check_given(
    *, callbacks: Any = None, optimizers: Any = (None, None), tools: Any = None, peft_config: Any = None, **given: Any
) -> None:
    """Refuses arguments that are classes, or stand in the place of others."""
    for name, value in {**given, "peft_config": peft_config}.items():
        _check_no_class(name, value)
        if isinstance(value, os.PathLike) and not name.endswith("dataset"):  # for which there is better advice
            raise TypeError(f"`{name}` is a {type(value).__name__}: expected a path as text, `str(path)`.")
        if isinstance(value, Mapping):
            for key, one in value.items():
                if not isinstance(key, str):
                    raise TypeError(
                        f"`{name}` has the name {key!r}, a {type(key).__name__}: expected text, {str(key)!r}."
                    )
                _check_no_class(f"{name}[{key!r}]", one)
    if isinstance(given.get("teacher_model"), TrainingArguments):
        raise TypeError(
            f"`teacher_model` is an {type(given['teacher_model']).__name__}: the teacher comes second, and the options "
            "third: pass `args=`."
        )
    _check_model(given.get("model"))
    _check_not_wrapped("model", given.get("model"))
    _check_not_wrapped("teacher_model", given.get("teacher_model"))
    _check_optimizers(optimizers)
    _check_list("callbacks", callbacks, "`TrainerCallback`s", _is_callback)
    _check_list("tools", tools, "functions", callable)
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        raise TypeError(
            f"`peft_config` is a {type(peft_config).__name__}: expected a `PeftConfig`, such as `LoraConfig(r=16)`."
        )
    if (task := getattr(peft_config, "task_type", None)) not in (None, "CAUSAL_LM"):
        raise ValueError(f"`peft_config.task_type` is {task}: the student is a causal language model, 'CAUSAL_LM'.")


def _check_no_class(name: str, value: Any) -> None:
    if isinstance(value, type):
        made = "from_pretrained" if hasattr(value, "from_pretrained") and name != "peft_config" else ""
        example = f"{value.__name__}{made and '.'}{made}(...)"
        raise TypeError(f"`{name}` is the class {value.__name__}: pass an object, `{example}`.")


def _check_model(model: Any) -> None:
    if not isinstance(model, str | nn.Module):
        raise TypeError(
            f"`model` is a {type(model).__name__}: expected a path, a model id, a `PreTrainedModel` or a `PeftModel`."
        )


def _check_not_wrapped(name: str, model: Any) -> None:
    kind = type(model).__name__
    is_compiled = kind == "OptimizedModule"  # of `torch.compile`; importing its module takes seconds
    if is_compiled or isinstance(model, nn.DataParallel | DistributedDataParallel):
        inside = f"`{name}.{'_orig_mod' if is_compiled else 'module'}`"
        raise TypeError(
            f"`{name}` is a {kind} around a model: pass the model itself, {inside}; the launch wraps it as it needs."
        )


def _check_optimizers(optimizers: Any) -> None:
    expected = "expected a tuple of an optimizer and a scheduler, `(optimizer, None)` for the default scheduler."
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        raise TypeError(f"`optimizers` is a {type(optimizers).__name__}: {expected}")
    optimizer, scheduler = optimizers
    if any(isinstance(one, type) for one in optimizers):
        raise TypeError(f"`optimizers` holds a class: {expected} `optim` in `OPSDConfig` takes the name of one.")
    if isinstance(optimizer, LRScheduler) or isinstance(scheduler, Optimizer):
        raise TypeError(f"`optimizers` are in the wrong order: {expected}")


def _check_list(name: str, value: Any, kind: str, fits: Callable[[Any], bool]) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise TypeError(f"`{name}` is a {type(value).__name__}: expected a list of {kind}.")
    for one in value:
        if not fits(one):
            raise TypeError(f"`{name}` holds a {type(one).__name__}: expected a list of {kind}.")


def _is_callback(value: Any) -> bool:
    """Whether transformers takes it as a callback; it makes an object of a class."""
    return issubclass(value, TrainerCallback) if isinstance(value, type) else isinstance(value, TrainerCallback)


logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The checked arguments of a trainer; no model is loaded yet."""

    args: OPSDConfig
    """The options."""
    models: dict[str, Any]
    """Teacher models, paths or model ids by name; `None` is the student itself."""
    train_dataset: AnyDataset | None
    """The rows to train on."""
    eval_dataset: EvalDatasets
    """The rows to evaluate on."""
    reads_solutions: bool
    """Whether a column `solution` is what only the teacher reads, as it would read nothing else."""
    rows: dict[str, Rows]
    """Both, and what is known of their rows, by their names in messages."""
    intake: Intake
    """Parses rows, with the names of these teachers."""
    processing_class: Any
    """A tokenizer, or a processor around one."""
    row_columns: tuple[str, ...]
    """Columns that are read."""
    rollout: Any
    """What generates."""
    rewards: tuple[Given, ...]
    """Reward functions and models, with their names and tokenizers."""
    without_effect: tuple[str, ...]
    """Options that are set and have no effect."""
    is_same_model: bool
    """Whether it was said that a teacher is the student, and reads nothing more."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer itself."""
        return text_tokenizer(self.processing_class)

    @property
    def processor(self) -> ProcessorMixin | None:
        """The processor, which is saved with the student; `None` if there is only a tokenizer."""
        return self.processing_class if isinstance(self.processing_class, ProcessorMixin) else None


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
    reward_funcs: Any,
    reward_processing_classes: Any,
    optimizers: Any,
    tools: Any,
    quantization_config: Any,
    row_columns: Collection[str],
    pick: Callable[[Any, OPSDConfig], Any],
    **others: Any,
) -> Prepared:
    """Runs every check that needs no loaded model."""
    check_given(
        model=model,
        teacher_model=teacher_model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
        teacher_processing_class=teacher_processing_class,
        rollout=rollout,
        optimizers=optimizers,
        tools=tools,
        quantization_config=quantization_config,
        **others,
    )
    args = checked_args(args, model, divergence)
    fingerprint.check_accepted(args.resume_with_changes)
    rewards = tuple(given_rewards(reward_funcs, reward_processing_classes))
    now = Situation(
        args=args,
        own_rollout=rollout is not None,
        optimizers=optimizers,
        tools=tools,
        objective=divergence,
        rewards=[one.name for one in rewards],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        teacher_prompt_fn=teacher_prompt_fn,
        row_columns=tuple(row_columns),
    )
    refuse(BUILDING if train_dataset is None else (*LEARNING, *BUILDING), now)
    picked = pick(rollout, args)
    check_named_once(teacher_model, args)
    teacher_model = args.teacher_model_name_or_path if teacher_model is None else teacher_model
    check_teachers(teacher_model, model, args)
    models = dict(teacher_model) if isinstance(teacher_model, Mapping) else {"teacher": teacher_model}
    if processing_class is not None:
        check_processing_class(processing_class)
    if teacher_prompt_fn is not None:
        check_prompt_fn(teacher_prompt_fn)
    train_dataset = with_prompts(train_dataset, "train_dataset")
    eval_dataset = with_prompts(eval_dataset, "eval_dataset")
    needs_context = needs_privilege(model, args, teacher_prompt_fn)
    if needs_context:
        train_dataset, eval_dataset = solutions_as_context(train_dataset), solutions_as_context(eval_dataset)
    datasets = {"train_dataset": train_dataset, **by_name(eval_dataset)}
    several = tuple(models) if len(models) > 1 else ()
    optional = PRIVILEGED if teacher_prompt_fn is None else ()  # a function may read columns of any name
    # a reference beside rewards, or a sharper self, differs from the student without a column
    check_datasets(datasets, args, several, optional, needs_context and not (args.tempers_apart or args.pulls))
    check_models(model, models, args)
    refuse(SURPRISES, now, logger.warning)
    tells_more = teacher_prompt_fn is not None or bool(args.teacher_template_kwargs)
    is_same_model = quantization_config is None and warn_of_same_model(model, models, args, datasets, tells_more)
    prompts = TeacherPrompts(template=args.teacher_prompt_template, prompt_fn=teacher_prompt_fn)
    intake = Intake(teachers=tuple(models), prompts=prompts)
    if args.world_size > 1:
        check_same_options(gather_object([_named(args, models)]))
        check_disk(args)
    row_columns = tuple(row_columns)
    if args.lmbda < 1:
        check_completions(train_dataset, tools, not args.seq_kd)
        row_columns = row_columns if args.seq_kd else (*row_columns, COMPLETION)
    check_rows_of_rewards(rewards, datasets, args, row_columns, needs_context)
    rows = looked_through(datasets, args, intake, row_columns)
    if processing_class is None:
        processing_class = loaded_processing_class(model, args.model_init_kwargs or {}, args.trust_remote_code)
        check_processing_class(processing_class)
    unread = without_effect(
        replace(now, teachers=list(models.values()), has_context=may_have(datasets, ("privileged_context",)))
    )
    if unread:
        logger.warning(without_effect_in_words(args, unread))
    found = Prepared(
        args=args,
        models=models,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        reads_solutions=needs_context,
        rows=rows,
        intake=intake,
        processing_class=processing_class,
        row_columns=row_columns,
        rollout=picked,
        rewards=rewards,
        without_effect=tuple(unread),
        is_same_model=is_same_model,
    )
    check_template(found.tokenizer, rows, args, tools, intake)
    ensure_special_tokens(found.tokenizer, configured_vocabulary(model, args.model_init_kwargs or {}))
    check_tokenizers(found.tokenizer, models, teacher_processing_class, args)
    check_up(args)
    return found


def _named(args: OPSDConfig, models: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how the student is trained; of paths the last part, as machines may keep models in other places."""
    paths = {f"teacher_model[{name!r}]": Path(one).name for name, one in models.items() if isinstance(one, str)}
    return {**shared_options(args), **paths}


def checked_args(args: DistillationConfig | None, model: Any, divergence: Divergence | str | None) -> OPSDConfig:
    """The options, or the defaults with an output folder named after the student.

    Raises:
        TypeError: `args` is not an [`OPSDConfig`].
        ValueError: `divergence` is neither a divergence nor the name of one, or an option was changed to a value that
            is refused.
    """
    a_divergence("divergence", divergence)
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        args = OPSDConfig(f"{name.split('/')[-1]}-OPSD")
    if not isinstance(args, OPSDConfig):
        remedy = (
            "which has every field of TRL's `DistillationConfig`; change the class name"
            if isinstance(args, TrainingArguments)
            else "which comes third, after the teacher; pass arguments by name"
        )
        raise TypeError(f"`args` is a {type(args).__name__}: expected a `trl_opsd.OPSDConfig`, {remedy}.")
    args.check_again()
    warn_of_outside()
    return args
