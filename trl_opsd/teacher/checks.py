"""Checks of teachers as a user passes them, of their options and tokenizers, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from torch import nn
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from trl_opsd._compat.peft import CausalLM, is_peft, without_peft
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd.config import OPSDConfig
from trl_opsd.data.images import settings_of
from trl_opsd.data.tokenization import check_token_maps
from trl_opsd.http.urls import ONLY, server_urls
from trl_opsd.models.checks import PLACE_OPTIONS, adapter_at, place_of
from trl_opsd.models.tokenizers import has_tokenizer, text_tokenizer, tokenizer_at
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher

logger = get_logger(__name__)

TeacherLike: TypeAlias = str | PreTrainedModel | Teacher
"""A path or model id, a model, or a teacher of the user's own."""
LOCATION_OPTIONS = (*PLACE_OPTIONS, "trust_remote_code")
"""Options for loading a model that also apply to its config and tokenizer."""
_OPTION = "teacher_server_url"


def teacher_loading(args: OPSDConfig) -> dict[str, Any]:
    """The options that say how teachers are loaded."""
    revision = {} if args.teacher_model_revision is None else {"revision": args.teacher_model_revision}
    trust = {"trust_remote_code": args.teacher_trust_remote_code}
    return {**revision, **trust, **(args.teacher_model_init_kwargs or {})}


def location(args: OPSDConfig) -> dict[str, Any]:
    """Those of them that also apply to config and tokenizer."""
    return {name: one for name, one in teacher_loading(args).items() if name in LOCATION_OPTIONS and one is not None}


def servers(args: OPSDConfig) -> dict[str, str]:
    """The address of each teacher's server by its name."""
    return server_urls(_OPTION, args.teacher_server_url)


def deadline(args: OPSDConfig) -> float:
    """Seconds that each teacher behind servers has for a batch."""
    # Teachers score one after the other, and other processes wait meanwhile, for at most `ddp_timeout`.
    return 0.9 * args.ddp_timeout / max(len(servers(args)), 1)


def check_served(teachers: Mapping[str, Any], args: OPSDConfig) -> None:
    """Refuses servers without a teacher, teachers behind servers that are no paths, and options that have no effect."""
    if not (urls := servers(args)):
        return
    if args.teacher_model_kind is not None:
        raise ValueError(
            f"`{_OPTION}` with `teacher_model_kind={args.teacher_model_kind!r}`: the student is its own teacher and "
            "exists only in this process: remove one of them."
        )
    if unknown := sorted(set(urls) - set(teachers)):
        raise ValueError(
            f"`{_OPTION}` has servers for {unknown}, but the teachers are {sorted(teachers)}: use their names, in a "
            'dict if there are several, such as `{"math": "http://127.0.0.1:8000"}`.'
        )
    for name in urls:
        if not isinstance(teachers[name], str):
            called = "`teacher_model`" if len(teachers) == 1 else f"`teacher_model[{name!r}]`"
            raise ValueError(
                f"`{_OPTION}` sets a server for the teacher, but {called} is a {type(teachers[name]).__name__}: pass "
                "the path or model id of its checkpoint, from which its head is loaded, or remove the server."
            )
    if set(urls) != set(teachers):
        return
    if args.teacher_offload != "none":
        raise ValueError(
            f"`teacher_offload={args.teacher_offload!r}` with `{_OPTION}`: the teacher's layers are on the server, and "
            "its head stays on the device: set it to 'none'."
        )
    if args.teacher_prefix_cache_gb:
        raise ValueError(
            f"`teacher_prefix_cache_gb={args.teacher_prefix_cache_gb!r}` with `{_OPTION}`: the server reads the rows, "
            "and this process has no keys and values: remove the option."
        )
    if others := [name for name in args.teacher_model_init_kwargs or {} if name not in LOCATION_OPTIONS]:
        raise ValueError(
            f"`teacher_model_init_kwargs` has {others[0]!r} with `{_OPTION}`: the server loads the teacher: remove it, "
            "and pass it to the server instead, for instance as `--dtype`."
        )


def check_up(args: OPSDConfig) -> None:
    """Waits until all servers of teachers are up; a `ValueError` if one is not in time."""
    for url in servers(args).values():
        from trl_opsd.teacher.servers import TeacherServer  # needs aiohttp, which may be absent without servers

        TeacherServer(url, deadline(args), args.teacher_server_timeout)


def check_teachers(teacher_model: Any, student: Any, args: OPSDConfig) -> None:
    """Checks the teachers as far as possible before anything is loaded: `TypeError` for what can be no teacher."""
    kind = args.teacher_model_kind
    if teacher_model is None and kind is None:
        raise ValueError(
            "There is no teacher: pass `teacher_model`, a model or a path, or set `teacher_model_name_or_path` in the "
            "config; or, for self-distillation, `teacher_model_kind='base'`."
        )
    if teacher_model is not None and kind is not None:
        raise ValueError(
            f"There are two teachers: `teacher_model`, and the student itself by `teacher_model_kind={kind!r}`: remove "
            "one of them."
        )
    if isinstance(teacher_model, Mapping):
        if len(teacher_model) < 2:
            raise ValueError(
                f"`teacher_model` is a dict with {len(teacher_model)} teachers: expected at least two names, or pass "
                "the teacher itself."
            )
        for name, one in teacher_model.items():
            if not name:
                raise ValueError(
                    "`teacher_model` has an empty name: expected a name that the column 'teacher' can contain."
                )
            _check_one(one, student, f"`teacher_model[{name!r}]`", args)
    elif teacher_model is not None:
        _check_one(teacher_model, student, "`teacher_model`", args)
    check_served(teacher_model if isinstance(teacher_model, Mapping) else {ONLY: teacher_model}, args)


def check_named_once(teacher_model: Any, args: OPSDConfig) -> None:
    """Refuses a teacher that is passed to the trainer while the options name another one."""
    named = args.teacher_model_name_or_path  # may name the same teacher, as in TRL's script
    passed = teacher_model if isinstance(teacher_model, str) else getattr(teacher_model, "name_or_path", None)
    if teacher_model is None or named is None or passed == named:
        return
    what = repr(teacher_model) if isinstance(teacher_model, str) else f"a {type(teacher_model).__name__}"
    raise ValueError(
        f"There are two teachers: `teacher_model`, {what}, and `teacher_model_name_or_path={named!r}` in the config: "
        "remove one of them."
    )


def _check_one(teacher_model: Any, student: Any, called: str, args: OPSDConfig) -> None:
    if teacher_model is student and not isinstance(student, str):
        raise ValueError(
            f"{called} and `model` are the same object: load the teacher as a separate object, or set "
            "`teacher_model_kind` for self-distillation."
        )
    known = isinstance(teacher_model, TeacherLike)
    if not known and not (isinstance(teacher_model, nn.Module) and is_peft(teacher_model)):
        is_reward = isinstance(teacher_model, list | tuple) or inspect.isroutine(teacher_model)
        raise TypeError(
            f"{called} is a {type(teacher_model).__name__}: expected a path, a `PreTrainedModel`, a `PeftModel`, "
            f"a `trl_opsd.Teacher`, or a dict of them by name{'; rewards are `methods=[Rewards(...)]`' * is_reward}."
        )
    if args.teacher_model_init_kwargs and not isinstance(teacher_model, str):
        raise ValueError(
            f"`teacher_model_init_kwargs` sets how to load a teacher, but {called} is an object: remove it, or pass "
            "the teacher's path."
        )
    if share_memory(teacher_model, student):
        raise ValueError(
            f"{called} shares parameters with the student, so it would be trained too: load the teacher as a separate "
            "object."
        )
    model = teacher_model.model if isinstance(teacher_model, FrozenTeacher) else teacher_model
    if isinstance(model, nn.Module) and fake_quantized(model):
        raise ValueError(
            f"{called} computes with the quantised weights of an earlier training (`student_quantization`): load the "
            "teacher anew, or from the folder `quantized` of a save if it is to teach quantised."
        )


def share_memory(teacher: Any, student: CausalLM) -> bool:
    """Whether training the student would change the teacher, or freezing the teacher freeze the student."""
    if isinstance(teacher, Teacher):  # it may hold models, and other teachers
        return any(share_memory(one, student) for one in vars(teacher).values())
    both = isinstance(teacher, nn.Module) and isinstance(student, nn.Module)
    return both and not _places(teacher).isdisjoint(_places(student))


def _places(model: nn.Module) -> set[tuple[str, int]]:
    """Identifies parameters by object and by address, as one parameter may be a view of another's memory."""
    parameters = list(model.parameters())
    addresses = {("address", parameter.data_ptr()) for parameter in parameters if not parameter.is_meta}
    sharded = {("address", 0)}  # ZeRO-3 leaves no local storage
    return {("object", id(parameter)) for parameter in parameters} | addresses - sharded


def check_tokenizers(
    tokenizer: PreTrainedTokenizerBase | None, teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> None:
    """Refuses teachers whose tokenizer maps ids differently than the student's, before a teacher is loaded."""
    if tokenizer is None:
        return
    for name, (theirs, source) in tokenizers_of(teachers, given, args).items():
        if theirs is not None:
            check_token_maps(tokenizer, theirs, name, source)


def tokenizers_of(
    teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> dict[str, tuple[PreTrainedTokenizerBase | None, str | None]]:
    """The tokenizer of each teacher, or `None`, and where it is kept if the teacher was loaded from there."""
    if isinstance(given, Mapping) and (unknown := set(given) - set(teachers)):
        raise ValueError(
            f"`teacher_processing_class` has {sorted(unknown)}, but the teachers are {sorted(teachers)}: use their "
            "names."
        )
    # Without a given tokenizer, the one at the teacher's path or where the object was loaded from.
    found: dict[str, tuple[PreTrainedTokenizerBase | None, str | None]] = {}
    for name, teacher in teachers.items():
        theirs, source = given.get(name) if isinstance(given, Mapping) else given, None
        if theirs is None and isinstance(teacher, str):
            theirs = _tokenizer_beside(teacher, args)
        elif theirs is None:
            model = teacher.model if isinstance(teacher, FrozenTeacher) else teacher
            if isinstance(model, nn.Module) and (source := get_config_model_id(without_peft(model).config)):
                theirs = _tokenizer_kept(source, name, args)
        found[name] = theirs and text_tokenizer(theirs), source
    return found


def teachers_processors(
    processor: ProcessorMixin | None, teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> dict[str, ProcessorMixin | None]:
    """The processors of teachers that read images otherwise than the student; `None` for one that reads text only."""
    found: dict[str, ProcessorMixin | None] = {}
    for name, teacher in teachers.items():
        theirs = given.get(name) if isinstance(given, Mapping) else given
        model = teacher.model if isinstance(teacher, FrozenTeacher) else teacher
        if name in servers(args) or (isinstance(model, Teacher) and not model.reads_images):
            theirs = False  # a server is sent ids only
        elif theirs is None and isinstance(model, str):
            adapter = adapter_at(model, location(args))  # saved beside a tokenizer, seldom beside a processor
            where = (model, location(args)) if adapter is None else (adapter.base, adapter.loading_of_base)
            theirs = processor_at(*where)
        elif theirs is None and isinstance(model, nn.Module):
            config = without_peft(model).config
            source = get_config_model_id(config)
            here = {"local_files_only": True, "trust_remote_code": args.teacher_trust_remote_code}
            theirs = (
                processor_at(source, here) if source and has_tokenizer(source, {"local_files_only": True}) else None
            )
            if theirs is None and config.get_text_config() is config:
                theirs = False
        reads_alike = isinstance(theirs, ProcessorMixin) and settings_of(theirs) == settings_of(processor)
        if theirs is not None and not reads_alike:
            found[name] = theirs if isinstance(theirs, ProcessorMixin) else None
    return found


def processor_at(path: str, options: Mapping[str, Any]) -> Any:
    """The processor at a path or model id, or its tokenizer; `None` where neither can be loaded."""
    try:
        return AutoProcessor.from_pretrained(path, **options)
    except (ImportError, OSError, ValueError) as error:
        logger.warning(
            f"The teacher's processor cannot be loaded from {path} ({str(error).strip().splitlines()[0]}): assuming "
            "the student's. Pass it as `teacher_processing_class`."
        )
        return None


def _tokenizer_beside(path: str, args: OPSDConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer at the path or model id that a teacher will be loaded from, or `None` if there is none."""
    path, options = tokenizer_at(path, location(args))
    if not has_tokenizer(path, place_of(options)):
        logger.warning(f"{path} has no tokenizer: assuming the student's.")
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **options)
    return tokenizer


def _tokenizer_kept(source: str, name: str, args: OPSDConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a loaded teacher was saved with, if it can be loaded without the network."""
    here = {"local_files_only": True}
    if not has_tokenizer(source, here):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=args.teacher_trust_remote_code, **here
        )
    except (OSError, ValueError) as error:
        logger.warning(
            f"The {name} was loaded from {source}, but its tokenizer cannot be loaded from there "
            f"({str(error).splitlines()[0]}) and is not compared with the student's: pass it as "
            "`teacher_processing_class`."
        )
        return None
    return tokenizer
