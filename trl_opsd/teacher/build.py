"""Turns what a user passes as a teacher into one; whether it can teach this student at all is decided here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from trl_opsd._compat.deepspeed import loading, reader_config
from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.backbone import is_sharded
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.hosted import Hosted
from trl_opsd.teacher.placement import Placement
from trl_opsd.teacher.resident import Resident
from trl_opsd.teacher.sharded import Sharded
from trl_opsd.teacher.streamed import Streamed
from trl_opsd.types import OutputHead

_PLACEMENTS: dict[str, Callable[[Any, torch.device], Placement]] = {
    "none": Resident,
    "cpu": Hosted,
    "stream": Streamed,
    "zero3": Sharded,
}
"""What each `teacher_offload` means."""
_OF_THE_CONFIG = ("revision", "trust_remote_code")
"""Options for loading a model that its config is loaded with too."""


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
    """A teacher where `args.teacher_offload` wants it, frozen.

    Args:
        teacher_model (`str` or [`~transformers.PreTrainedModel`] or [`Teacher`]):
            A [`Teacher`] is returned as it is.
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, loaded.
        args ([`OPSDConfig`]):
            Says how to load a teacher from a path, and where it and its targets shall be.
        device (`torch.device`):
            Where the teacher reads, unless it was loaded with a device map.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar while the teacher reads, if that takes long.

    Raises:
        ValueError: The teacher cannot teach this student, or not from there; the message says why.
    """
    if isinstance(teacher_model, Teacher):
        if args.teacher_offload != "none":
            raise ValueError(
                f"`teacher_offload={args.teacher_offload!r}` cannot move a {type(teacher_model).__name__}, which "
                "decides itself where its weights are: remove the option, or pass the model itself."
            )
        return teacher_model
    if isinstance(teacher_model, str):
        teacher_model = _loaded(teacher_model, args, device)
    elif args.teacher_model_init_kwargs:
        raise ValueError(
            "`teacher_model_init_kwargs` says how to load a teacher, but the teacher is given as an object: remove it, "
            "or pass the path of the teacher."
        )
    elif is_sharded(teacher_model):
        raise ValueError(
            "The teacher was split over the processes by the student's ZeRO-3 config while it was loaded: pass its "
            "path, which is loaded as `teacher_offload` says, or load it before the config is built."
        )
    _check_movable(teacher_model, args.teacher_offload)
    if _share_parameters(teacher_model, student):
        raise ValueError(
            "The teacher shares parameters with the student, so it would learn with it: load the teacher as an object "
            "of its own."
        )
    _check_vocabularies(student, teacher_model)
    placement = _PLACEMENTS[args.teacher_offload](teacher_model, device)
    return FrozenTeacher(placement, cache_device=args.teacher_cache_device, progress=progress)


def _loaded(path: str, args: Any, device: torch.device) -> PreTrainedModel:
    """A teacher from a path, read straight to where it will live."""
    kwargs = {
        "dtype": None,
        "revision": args.teacher_model_revision,
        "trust_remote_code": args.teacher_trust_remote_code,
        "use_safetensors": True,
        **(args.teacher_model_init_kwargs or {}),
    }
    if kwargs["revision"] is None:
        del kwargs["revision"]
    config = None
    if args.teacher_offload != "none":
        kwargs["device_map"] = None
        theirs = AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in _OF_THE_CONFIG if name in kwargs})
        _check_movable(theirs, args.teacher_offload)
        if args.teacher_offload == "zero3":
            asked = getattr(torch, str(kwargs["dtype"]).removeprefix("torch."), None)
            config = reader_config(asked or theirs.dtype or torch.float32, theirs.get_text_config().hidden_size, device)
    elif args.distributed_state.distributed_type != DistributedType.NO:
        kwargs["device_map"] = {"": device}
    with loading(config):
        return create_model_from_path(path, **kwargs)


def _check_movable(teacher: Any, offload: str) -> None:
    """Looks at a model, or at a config before there is a model."""
    if offload == "none":
        return
    if getattr(teacher, "is_quantized", False) or getattr(teacher, "quantization_config", None) is not None:
        raise ValueError(
            f"`teacher_offload={offload!r}` with a quantised teacher: quantised weights carry state that belongs to "
            "the device they were made on, and moving them would not keep it. Leave `teacher_offload='none'`, for "
            "which it is small enough sooner, or take a teacher that is not quantised."
        )
    if getattr(teacher, "hf_device_map", None) is not None:
        raise ValueError(
            f"`teacher_offload={offload!r}` with a teacher that was loaded with a device map "
            f"({teacher.hf_device_map}): accelerate already moves its weights. Load it without `device_map`, or leave "
            "`teacher_offload='none'`."
        )


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
