"""Checks models, rewards and chat templates before anything is loaded, and loads reward models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.peft import CausalLM, has_foreign_adapter
from trl_opsd.config import OPSDConfig
from trl_opsd.data.admission import Rows
from trl_opsd.data.chat_templates import (
    check_template_arguments,
    check_that_all_is_read,
    warn_of_ended_text,
    warn_of_prompts,
)
from trl_opsd.data.datasets import AnyDataset, columns_of
from trl_opsd.data.prompts import PromptLimits
from trl_opsd.data.readers import Intake, Request
from trl_opsd.data.teacher_prompts import PRIVILEGED
from trl_opsd.models.backbone import context_of
from trl_opsd.models.checks import (
    check_in_memory,
    check_own_loss,
    language_config,
    same_weights,
    whole_checkpoint,
)
from trl_opsd.models.head import model_shape
from trl_opsd.rewards.functions import Rewards
from trl_opsd.rewards.given import Given, check_columns
from trl_opsd.rewards.model import RewardModel, loaded_model
from trl_opsd.teacher.checks import check_teachers, check_tokenizers

logger = get_logger(__name__)


# ---- Models ---------------------------------------------------------------------------------------------------------


def check_models(student: Any, teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    """Refuses models that cannot be found or are no causal language models; a user's own [`Teacher`] is not checked."""
    own_code = {"trust_remote_code": args.trust_remote_code}
    config = language_config(student, "model", {**own_code, **(args.model_init_kwargs or {})})
    check_own_loss({**config, **(args.model_init_kwargs or {})})
    check_in_memory(student, args.device)
    _check_no_foreign_adapter(student, teachers)
    _check_teacher_models(teachers, args)


def _check_no_foreign_adapter(student: Any, teachers: Mapping[str, Any]) -> None:
    """Refuses a student in whose layers the adapter of an earlier trainer is left, and tells of such a teacher.

    PEFT puts an adapter into the layers of the model it is given. Another one would join it, and without another one
    only what is left would be trained.
    """
    if isinstance(student, nn.Module) and has_foreign_adapter(student):
        raise ValueError(
            "`model` still has the adapter of an earlier trainer in its layers, where PEFT puts it: take it out, "
            "`model = trainer.model.unload()` with that trainer (`merge_and_unload()` to keep what it has learned), or "
            "load the model again; to train that adapter further, pass `trainer.model` without a `peft_config`."
        )
    for teacher in teachers.values():
        if isinstance(teacher, nn.Module) and has_foreign_adapter(teacher):
            logger.warning(
                f"The teacher, a {type(teacher).__name__}, still has the adapter of an earlier trainer in its layers, "
                "and teaches with it: if that is not meant, call that trainer's `trainer.model.unload()`, or load it "
                "again."
            )


def _check_teacher_models(teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    own_code = {"trust_remote_code": args.teacher_trust_remote_code}
    loading = {**own_code, "revision": args.teacher_model_revision, **(args.teacher_model_init_kwargs or {})}
    for name, teacher in teachers.items():
        called = "teacher_model" if len(teachers) == 1 else f"teacher_model[{name!r}]"
        language_config(teacher, called, loading, trust="teacher_trust_remote_code")


def check_other_teacher(
    teacher_model: Any, student: CausalLM, args: OPSDConfig, tokenizer: PreTrainedTokenizerBase, names: Collection[str]
) -> None:
    """Checks a teacher that is to replace the one the trainer was built with, before it is loaded."""
    if len(names) > 1 or isinstance(teacher_model, Mapping):
        raise ValueError(
            f"`trainer.teacher_model` stands for one teacher, and {len(names)} are there ({', '.join(names)}): pass "
            "several, as a dict, when the trainer is built."
        )
    if teacher_model is None:
        raise ValueError("`trainer.teacher_model = None`: a trainer needs a teacher; assign another model or path.")
    check_teachers(teacher_model, student, args)
    models = {"teacher": teacher_model}
    _check_no_foreign_adapter(student, models)
    _check_teacher_models(models, args)
    check_tokenizers(tokenizer, models, None, args)


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


def may_have(datasets: Mapping[str, AnyDataset | None], names: Collection[str]) -> bool:
    """Whether a dataset has one of these columns, or has columns that are not known."""
    columns = [columns_of(one) for one in datasets.values() if one is not None]
    return any(one is None or not set(names).isdisjoint(one) for one in columns)


# ---- Rewards --------------------------------------------------------------------------------------------------------


def check_rows_of_rewards(
    rewards: Sequence[Given],
    datasets: Mapping[str, AnyDataset | None],
    args: OPSDConfig,
    row_columns: Collection[str],
    reads_solutions: bool,
) -> None:
    """Checks that functions can be called for the rows that are evaluated, and learned where they are called then."""
    known: dict[str, Collection[str] | None] = {}
    for where, dataset in datasets.items():
        if dataset is None or (where == "train_dataset" and not args.reward_weight):
            continue
        columns = columns_of(dataset)
        if columns is not None:
            seen = {one for one in columns if one in row_columns or not args.remove_unused_columns}
            columns = [*seen, *(("solution",) if reads_solutions and "privileged_context" in seen else ())]
        known[where] = columns
    check_columns(rewards, known)


def build_rewards(
    rewards: Sequence[Given], args: OPSDConfig, template: Mapping[str, Any], device: torch.device
) -> Rewards | None:
    """Functions of all rewards, with their models loaded; `None` if there are none."""
    if not rewards:
        return None
    functions = {}
    for number, one in enumerate(rewards):
        function = one.source
        if one.is_model:
            assert one.tokenizer is not None, "it was loaded with the arguments"
            with whole_checkpoint(f"reward_funcs[{number}]"):
                model = loaded_model(function) if isinstance(function, str) else function
            placed = model if getattr(model, "hf_device_map", None) else model.to(device)
            function = RewardModel(placed, one.tokenizer, template, args.per_device_train_batch_size)
        functions[one.name] = function
    weights = torch.tensor(args.reward_weights or [1.0] * len(functions), dtype=torch.float32)
    return Rewards(functions=functions, weights=weights)


# ---- Chat templates -------------------------------------------------------------------------------------------------


def check_template(
    tokenizer: PreTrainedTokenizerBase, datasets: Mapping[str, Rows], args: OPSDConfig, tools: Any, intake: Intake
) -> None:
    """Checks what the chat template is given: its arguments, and whether prompts are meant for it."""
    if wrong := check_template_arguments(tokenizer, "teacher_chat_template_kwargs", args.teacher_template_kwargs):
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
    for row in rows if tokenizer.chat_template else ():
        for prompt, read in ((row.student, render), (row.of_teacher, partial(render, **args.teacher_template_kwargs))):
            if prompt.kind == "messages":
                check_that_all_is_read(prompt.value, read, prompt.where)
    theirs = (row.of_teacher for row in rows if row.of_teacher is not row.student)
    warn_of_ended_text(tokenizer, {one.where: one.value for one in theirs if one.kind == "text"}, render)
