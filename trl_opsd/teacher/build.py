"""Turns what a user passes as a teacher into one; whether it can teach this student at all is decided here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType, is_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.backbone import is_sharded
from trl_opsd.teacher.average import Average
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.own import OwnTeacher

logger = get_logger(__name__)

TeacherLike: TypeAlias = str | PreTrainedModel | Teacher
"""A path or model id, a model, or a teacher of the user's own."""


def check_teachers(teacher_model: Any, student: Any, kind: str | None) -> None:
    """What can be said before anything is loaded.

    Args:
        teacher_model (`Any`):
            A [`TeacherLike`], several by name, or `None`.
        student (`Any`):
            The student, a path or a model.
        kind (`str`, *optional*):
            In which of its states the student is its own teacher.

    Raises:
        ValueError: There is no teacher, or it is the student, or there are two ways to get one.
        TypeError: It is nothing that can teach.
    """
    if teacher_model is None and kind is None:
        raise ValueError(
            "There is no teacher: pass `teacher_model`, a model or a path, or set `teacher_model_name_or_path` in the "
            "config; or `teacher_model_kind='base'`, and the student teaches itself."
        )
    if teacher_model is not None and kind is not None:
        raise ValueError(
            f"There are two teachers: `teacher_model`, and the student itself by `teacher_model_kind={kind!r}`: leave "
            "one of them out."
        )
    if isinstance(teacher_model, Mapping):
        if len(teacher_model) < 2:
            raise ValueError(
                f"`teacher_model` is a dict with {len(teacher_model)} teachers: expected at least two names, or pass "
                "the teacher itself."
            )
        for name, one in teacher_model.items():
            _check_one(one, student, f"`teacher_model[{name!r}]`")
    elif teacher_model is not None:
        _check_one(teacher_model, student, "`teacher_model`")


def _check_one(teacher_model: Any, student: Any, called: str) -> None:
    if teacher_model is student and not isinstance(student, str):
        raise ValueError(
            f"{called} and `model` are the same object: load the teacher as an object of its own, or set "
            "`teacher_model_kind`, and the student teaches itself."
        )
    known = isinstance(teacher_model, TeacherLike)
    if not known and not (isinstance(teacher_model, nn.Module) and is_peft_model(teacher_model)):
        raise TypeError(
            f"{called} is a {type(teacher_model).__name__}: expected a path, a `PreTrainedModel`, a `PeftModel`, "
            "a `trl_opsd.Teacher`, or a dict of them by name."
        )


def build_teacher(
    teacher_model: TeacherLike,
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
    return _frozen(teacher_model, args, device, progress)


def build_own_teacher(
    student: Any, args: Any, device: torch.device, progress: bool = False
) -> tuple[Teacher, Average | None]:
    """A teacher that is the student in another state, and the average it follows, if it does.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, loaded, before training.
        args ([`OPSDConfig`]):
            Its `teacher_model_kind` says which state.
        device (`torch.device`):
            Where a copy would live.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar while the teacher reads, if that takes long.

    Raises:
        ValueError: This student cannot be its own teacher in that way; the message says why.
    """
    kind, rows = args.teacher_model_kind, args.per_device_train_batch_size
    if kind == "live":
        return OwnTeacher(student, nullcontext, rows, progress), None
    if kind == "base" and is_peft_model(student):
        return OwnTeacher(student, student.disable_adapter, rows, progress), None
    if is_sharded(student):
        raise ValueError(
            f"`teacher_model_kind={kind!r}` keeps a copy of the student's weights, but ZeRO-3 has already split them: "
            "pass the student's path as `teacher_model` for 'base', train LoRA, or use 'live'."
        )
    followed = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    if is_peft_model(student):
        if others := [name for name in followed if "lora_" not in name]:
            raise ValueError(
                f"`teacher_model_kind='ema'` averages LoRA weights only, but {others[0]!r} is trained too: use a plain "
                "`LoraConfig`, or 'base' or 'live'."
            )
        average = _average(followed, {name: tensor.detach().clone() for name, tensor in followed.items()}, args)
        return OwnTeacher(student, average.in_student, rows, progress), average
    teacher = _frozen(copy.deepcopy(student), args, device, progress)
    if kind == "base":
        return teacher, None
    copied = dict(teacher.model.named_parameters())
    return teacher, _average(followed, {name: copied[name] for name in followed}, args)


def teacher_tokenizer(teacher_model: Any, args: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a teacher, for comparing; `None` where there is none."""
    if not isinstance(teacher_model, str):
        return None
    place: dict[str, Any] = {"revision": args.teacher_model_revision} if args.teacher_model_revision else {}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    # Without its files `AutoTokenizer` makes up an empty tokenizer of the model's family.
    if not any(
        cached_file(teacher_model, name, **place, **quiet) for name in ("tokenizer_config.json", "tokenizer.json")
    ):
        logger.warning(f"{teacher_model} has no tokenizer, so it is taken to have the student's.")
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        teacher_model, **place, trust_remote_code=args.teacher_trust_remote_code
    )
    return tokenizer


def _average(student: Mapping[str, Tensor], teacher: Mapping[str, Tensor], args: Any) -> Average:
    return Average(student, teacher, rate=args.teacher_update_rate, every=args.teacher_sync_steps)


def _frozen(model: Any, args: Any, device: torch.device, progress: bool) -> FrozenTeacher:
    if getattr(model, "hf_device_map", None) is None:
        model = model.to(device)
    return FrozenTeacher(model, rows_per_pass=args.per_device_train_batch_size, progress=progress)


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
