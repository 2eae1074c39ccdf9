"""Turns what a user passes as a teacher into one; whether it can teach this student at all is decided here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from trl_opsd._compat.deepspeed import loading, reader_config, recompute_buffers
from trl_opsd._compat.peft import is_peft, without_adapter
from trl_opsd._compat.sharding import in_zero3_model, spread, trained_parameters, whole, whole_copy
from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.config import OPSDConfig
from trl_opsd.data.vocabulary import check_token_maps
from trl_opsd.models.backbone import Run
from trl_opsd.models.padding import Reading
from trl_opsd.teacher.average import Average
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher
from trl_opsd.teacher.hosted import Hosted
from trl_opsd.teacher.layerwise import Streamed
from trl_opsd.teacher.own import OwnTeacher
from trl_opsd.teacher.placement import Placement
from trl_opsd.teacher.resident import Resident
from trl_opsd.teacher.sharded import Sharded
from trl_opsd.teacher.sharing import share_memory

logger = get_logger(__name__)

TeacherLike: TypeAlias = str | PreTrainedModel | Teacher
"""A path or model id, a model, or a teacher of the user's own."""

_PLACEMENTS: dict[str, Callable[[Any, torch.device], Placement]] = {
    "none": Resident,
    "cpu": Hosted,
    "stream": Streamed,
    "zero3": Sharded,
}
"""What each `teacher_offload` means."""
_WHERE_IT_IS = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
"""Options for loading a model that its config and its tokenizer are loaded with too."""


def check_teachers(teacher_model: Any, student: Any, args: OPSDConfig) -> None:
    """What can be said before anything is loaded.

    Args:
        teacher_model (`Any`):
            A [`TeacherLike`], several by name, or `None`.
        student (`Any`):
            The student, a path or a model.
        args ([`OPSDConfig`]):
            Says whether the student is its own teacher, and where a teacher lives.

    Raises:
        ValueError: There is no teacher, or it is the student, or there are two ways to get one.
        TypeError: It is nothing that can teach.
    """
    kind = args.teacher_model_kind
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
    if kind == "ema" and args.teacher_offload == "zero3":
        raise ValueError(
            "`teacher_offload='zero3'` with `teacher_model_kind='ema'`: every process keeps the whole average. Set "
            "`teacher_offload='cpu'` or 'stream', which keep the teacher in host memory."
        )
    if isinstance(teacher_model, Mapping):
        if len(teacher_model) < 2:
            raise ValueError(
                f"`teacher_model` is a dict with {len(teacher_model)} teachers: expected at least two names, or pass "
                "the teacher itself."
            )
        if args.teacher_offload == "zero3":
            raise ValueError(
                "`teacher_offload='zero3'` with several teachers: all processes read with a sharded teacher together, "
                "but one of them may have no row of it. Set `teacher_offload='stream'`."
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
    if not known and not (isinstance(teacher_model, nn.Module) and is_peft(teacher_model)):
        raise TypeError(
            f"{called} is a {type(teacher_model).__name__}: expected a path, a `PreTrainedModel`, a `PeftModel`, "
            "a `trl_opsd.Teacher`, or a dict of them by name."
        )
    if share_memory(teacher_model, student):
        raise ValueError(
            f"{called} shares parameters with the student, so it would learn with it: load the teacher as an object of "
            "its own."
        )


def build_teacher(
    teacher_model: TeacherLike,
    args: OPSDConfig,
    device: torch.device,
    progress: bool = False,
) -> Teacher:
    """A teacher where `args.teacher_offload` wants it, frozen.

    Args:
        teacher_model (`str` or [`~transformers.PreTrainedModel`] or [`Teacher`]):
            A [`Teacher`] is returned as it is.
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
    elif in_zero3_model(teacher_model):
        raise ValueError(
            "The teacher was split over the processes by the student's ZeRO-3 config while it was loaded: pass its "
            "path, which is loaded as `teacher_offload` says, or load it before the config is built."
        )
    return _frozen(teacher_model, args, device, progress)


def build_teachers(
    models: Mapping[str, Any],
    student: Any,
    run: Run,
    reading: Callable[[], Reading],
    args: OPSDConfig,
    device: torch.device,
    progress: bool = False,
) -> tuple[dict[str, Teacher], Average | None]:
    """All teachers by name, and the average that the student's own follows, if there is one.

    Args:
        models (`Mapping`):
            What each is made of, by name; `None` is the student itself.
        student, run, reading:
            As [`build_own_teacher`] takes them.
        args ([`OPSDConfig`]):
            Says how to load them, and where they live.
        device (`torch.device`):
            Where they read.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar while one reads, if that takes long.
    """
    teachers: dict[str, Teacher] = {}
    average: Average | None = None
    for name, model in models.items():
        if model is None:
            teachers[name], average = build_own_teacher(student, run, reading, args, device, progress)
        else:
            teachers[name] = build_teacher(model, args, device, progress)
    return teachers, average


def build_own_teacher(
    student: Any,
    run: Run,
    reading: Callable[[], Reading],
    args: OPSDConfig,
    device: torch.device,
    progress: bool = False,
) -> tuple[Teacher, Average | None]:
    """A teacher that is the student in another state, and the average it follows, if it does.

    Args:
        student ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The student, loaded, before training.
        run (`Callable`):
            `run(function, *args)` equals `function(student, *args)`, also when it is split.
        reading (`Callable`):
            Says which rows the student reads in one batch.
        args ([`OPSDConfig`]):
            Its `teacher_model_kind` says which state.
        device (`torch.device`):
            Where a copy would live.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar while the teacher reads, if that takes long.

    Raises:
        ValueError: This student cannot be its own teacher in that way; the message says why.
    """
    kind = args.teacher_model_kind
    if (kind == "live" or is_peft(student)) and args.teacher_offload != "none":
        raise ValueError(
            f"`teacher_offload={args.teacher_offload!r}` has nothing to move: with `teacher_model_kind={kind!r}` this "
            "student teaches with its own weights. Leave `teacher_offload='none'`."
        )
    own = partial(OwnTeacher, student, run, reading=reading, cache_device=args.teacher_cache_device, progress=progress)
    if kind == "live":
        return own(nullcontext), None
    if kind == "base" and is_peft(student):
        return own(partial(without_adapter, student)), None
    followed = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    if is_peft(student):
        if others := [name for name in followed if "lora_" not in name]:
            raise ValueError(
                f"`teacher_model_kind='ema'` averages LoRA weights only, but {others[0]!r} is trained too: use a plain "
                "`LoraConfig`, or 'base' or 'live'."
            )
        adapter = {name: whole(parameter).clone() for name, parameter in followed.items()}
        spread(adapter, device)
        average = _average(student, adapter, args)
        return own(average.in_student), average
    copied = whole_copy(student)
    spread(copied.state_dict(), device)
    teacher = _frozen(copied, args, device, progress)
    if kind == "base":
        return teacher, None
    parameters = dict(teacher.model.named_parameters())
    return teacher, _average(student, {name: parameters[name] for name in followed}, args)


def check_tokenizers(
    tokenizer: PreTrainedTokenizerBase | None, teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> None:
    """Compares the student's tokenizer with each teacher's, before a teacher is loaded.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The student's; `None` means that it is not loaded yet, and nothing is compared.
        teachers (`Mapping[str, Any]`):
            By name what the user passes as them.
        given ([`~transformers.PreTrainedTokenizerBase`] or a `dict` of them by name, *optional*):
            The teachers' own. When `None`, those that lie beside their paths.
        args ([`OPSDConfig`]):
            Says how to load a tokenizer from a path.

    Raises:
        ValueError: Two differ, in which ids the message says; or a name is none of a teacher.
    """
    if tokenizer is None:
        return
    if isinstance(given, Mapping) and (unknown := set(given) - set(teachers)):
        raise ValueError(
            f"`teacher_processing_class` names {sorted(unknown)}, but the teachers are {sorted(teachers)}: use their "
            "names."
        )
    for name, teacher in teachers.items():
        theirs = given.get(name) if isinstance(given, Mapping) else given
        if theirs is None:
            theirs = _tokenizer_beside(teacher, args)
        if theirs is not None:
            check_token_maps(tokenizer, theirs, name)


def _tokenizer_beside(teacher_model: Any, args: OPSDConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a teacher's weights, or `None`."""
    if not isinstance(teacher_model, str):
        return None
    asked = {
        "revision": args.teacher_model_revision,
        "trust_remote_code": args.teacher_trust_remote_code,
        **(args.teacher_model_init_kwargs or {}),
    }
    options = {name: asked[name] for name in _WHERE_IT_IS if asked.get(name) is not None}
    place = {name: value for name, value in options.items() if name != "trust_remote_code"}
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    # Without its files `AutoTokenizer` makes up an empty tokenizer of the model's family.
    if not any(
        cached_file(teacher_model, name, **place, **quiet) for name in ("tokenizer_config.json", "tokenizer.json")
    ):
        logger.warning(f"{teacher_model} has no tokenizer, so it is taken to have the student's.")
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(teacher_model, **options)
    return tokenizer


def _average(student: nn.Module, teacher: Mapping[str, Tensor], args: OPSDConfig) -> Average:
    followed = partial(trained_parameters, student)
    return Average(followed, teacher, rate=args.teacher_update_rate, every=args.teacher_sync_steps)


def _frozen(model: Any, args: OPSDConfig, device: torch.device, progress: bool) -> FrozenTeacher:
    _check_movable(model, args.teacher_offload)
    placement = _PLACEMENTS[args.teacher_offload](model, device)
    return FrozenTeacher(placement, cache_device=args.teacher_cache_device, progress=progress)


def _loaded(path: str, args: OPSDConfig, device: torch.device) -> PreTrainedModel:
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
        theirs = AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in _WHERE_IT_IS if name in kwargs})
        _check_movable(theirs, args.teacher_offload)
        if args.teacher_offload == "zero3":
            asked = getattr(torch, str(kwargs["dtype"]).removeprefix("torch."), None)
            config = reader_config(asked or theirs.dtype or torch.float32, theirs.get_text_config().hidden_size, device)
    elif args.distributed_state.distributed_type != DistributedType.NO:
        kwargs["device_map"] = {"": device}
    with loading(config):
        model: PreTrainedModel = create_model_from_path(path, **kwargs)
    if config is not None:
        recompute_buffers(model)
    return model


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
