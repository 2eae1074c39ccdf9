"""Checks models before one is loaded, and a teacher that is to replace another."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedTokenizerBase

from trl_opsd._compat.peft import CausalLM, has_foreign_adapter
from trl_opsd.config import OPSDConfig
from trl_opsd.data.prompts import PromptLimits
from trl_opsd.models.backbone import context_of
from trl_opsd.models.checks import check_in_memory, check_own_loss, language_config
from trl_opsd.models.head import model_shape
from trl_opsd.teacher.checks import check_teachers, check_tokenizers

logger = get_logger(__name__)


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
