"""Turns what a user passes as a teacher into one; whether it can teach this student at all is decided here."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers import PreTrainedModel

from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.backbone import is_sharded
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.types import OutputHead


def check_teacher(teacher_model: Any, student: Any) -> None:
    """What can be said before anything is loaded.

    Raises:
        ValueError: There is no teacher, or it is the student.
        TypeError: It is nothing that can teach.
    """
    if teacher_model is None:
        raise ValueError(
            "There is no teacher: pass `teacher_model`, a model or a path, or set `teacher_model_name_or_path` in the "
            "config."
        )
    if teacher_model is student:
        raise ValueError("`teacher_model` and `model` are the same object: load the teacher as an object of its own.")
    known = isinstance(teacher_model, str | PreTrainedModel | Teacher)
    if not known and not (isinstance(teacher_model, nn.Module) and is_peft_model(teacher_model)):
        raise TypeError(
            f"`teacher_model` is a {type(teacher_model).__name__}: expected a path, a `PreTrainedModel`, a `PeftModel` "
            "or a `trl_opsd.Teacher`."
        )


def build_teacher(
    teacher_model: str | PreTrainedModel | Teacher,
    student: nn.Module,
    args: Any,
    device: torch.device,
    progress: bool = False,
) -> Teacher:
    """A teacher on the device, frozen.

    Args:
        teacher_model (`str` or [`~transformers.PreTrainedModel`] or [`Teacher`]):
            A [`Teacher`] is returned as it is.
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, loaded.
        args ([`OPSDConfig`]):
            Says how to load a teacher from a path, and how many rows to read at once.
        device (`torch.device`):
            Where the teacher will live, unless it was loaded with a device map.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar while the teacher reads, if that takes long.

    Raises:
        ValueError: The teacher cannot teach this student; the message says why.
    """
    if isinstance(teacher_model, Teacher):
        return teacher_model
    if isinstance(teacher_model, str):
        teacher_model = _loaded(teacher_model, args)
    elif args.teacher_model_init_kwargs:
        raise ValueError(
            "`teacher_model_init_kwargs` says how to load a teacher, but the teacher is given as an object: remove it, "
            "or pass the path of the teacher."
        )
    if is_sharded(teacher_model):
        raise ValueError(
            "The teacher was split over the processes by ZeRO-3 while it was loaded, which is not supported yet: load "
            "it before the config is built, and pass the object; each process then keeps a whole teacher."
        )
    if _share_parameters(teacher_model, student):
        raise ValueError(
            "The teacher shares parameters with the student, so it would learn with it: load the teacher as an object "
            "of its own."
        )
    _check_vocabularies(student, teacher_model)
    if getattr(teacher_model, "hf_device_map", None) is None:
        teacher_model = teacher_model.to(device)
    return FrozenTeacher(teacher_model, rows_per_pass=args.per_device_train_batch_size, progress=progress)


def _loaded(path: str, args: Any) -> PreTrainedModel:
    kwargs = {
        "dtype": None,
        "revision": args.teacher_model_revision,
        "trust_remote_code": args.teacher_trust_remote_code,
        "use_safetensors": True,
        **(args.teacher_model_init_kwargs or {}),
    }
    if args.distributed_state.distributed_type != DistributedType.NO:
        kwargs["device_map"] = None
    if kwargs["revision"] is None:
        del kwargs["revision"]
    return create_model_from_path(path, **kwargs)


def _share_parameters(one: nn.Module, other: nn.Module) -> bool:
    mine = {id(parameter) for parameter in one.parameters()}
    return any(id(parameter) in mine for parameter in other.parameters())


def _check_vocabularies(student: Any, teacher: Any) -> None:
    mine, yours = _head_rows(student), _head_rows(teacher)
    if mine != yours:
        raise ValueError(
            f"The teacher's vocabulary has {yours} tokens, the student's {mine}: the loss compares the two "
            "distributions token by token, so pass a teacher with as many."
        )


def _head_rows(model: Any) -> int:
    """Tokens a model can predict; where its head was split, its config has to be believed."""
    rows: int = model.config.get_text_config().vocab_size if is_sharded(model) else len(OutputHead.of(model).weight)
    return rows
