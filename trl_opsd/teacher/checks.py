"""Checks of teachers as a user passes them, of their options and tokenizers, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from accelerate.logging import get_logger
from torch import nn
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from trl_opsd._compat.peft import CausalLM, is_peft, without_peft
from trl_opsd._compat.torchao import fake_quantized
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd._compat.urls import ONLY, server_urls
from trl_opsd.config import OPSDConfig
from trl_opsd.data.images import settings_of
from trl_opsd.data.tokenization import check_token_maps
from trl_opsd.models.checks import PLACE_OPTIONS, adapter_at, place_of
from trl_opsd.models.tokenizers import has_tokenizer, text_tokenizer, tokenizer_at
from trl_opsd.options.rules import refuse, shown
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.frozen import FrozenTeacher

logger = get_logger(__name__)

TeacherLike: TypeAlias = str | PreTrainedModel | Teacher
"""A path or model id, a model, or a teacher of the user's own."""
LOCATION_OPTIONS = (*PLACE_OPTIONS, "trust_remote_code")
"""Options for loading a model that also apply to its config and tokenizer."""


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
    return server_urls("teacher_server_url", args.teacher_server_url)


def deadline(args: OPSDConfig) -> float:
    """Seconds that each teacher behind servers has for a batch."""
    # Teachers score one after the other, and other processes wait meanwhile, for at most `ddp_timeout`.
    return 0.9 * args.ddp_timeout / max(len(servers(args)), 1)


def check_up(args: OPSDConfig) -> None:
    """Waits until all servers of teachers are up; a `ValueError` if one is not in time."""
    for url in servers(args).values():
        from trl_opsd.teacher.servers import TeacherServer  # needs aiohttp, which may be absent without servers

        TeacherServer(url, deadline(args), args.teacher_server_timeout)


def check_named_once(teacher_model: Any, args: OPSDConfig) -> None:
    """Refuses a teacher that is passed to the trainer while the options name another one."""
    named = args.teacher_model_name_or_path  # may name the same teacher, as in TRL's script
    passed = teacher_model if isinstance(teacher_model, str) else getattr(teacher_model, "name_or_path", None)
    both = f"There are two teachers, `teacher_model` and {shown(args, 'teacher_model_name_or_path')}"
    refuse([(teacher_model is not None and named not in (None, passed), both, "remove one of them")])


def check_teachers(teacher_model: Any, student: Any, args: OPSDConfig) -> None:
    """Checks the teachers as far as possible before anything is loaded: `TypeError` for what can be no teacher."""
    is_given, kind, urls = teacher_model is not None, args.teacher_model_kind, servers(args)
    teachers = teacher_model if isinstance(teacher_model, Mapping) else {ONLY: teacher_model}
    objects = [name for name in urls if not isinstance(teachers.get(name, ""), str)]
    refuse(
        [
            (
                not (teachers if is_given else kind),
                "There is no teacher",
                "pass `teacher_model`, a model or a path, or set `teacher_model_name_or_path` in the config; or, for "
                "self-distillation, `teacher_model_kind='base'`",
            ),
            (
                is_given and kind is not None,
                f"There are two teachers, `teacher_model` and {shown(args, 'teacher_model_kind')}",
                "remove one of them",
            ),
            (
                isinstance(teacher_model, Mapping) and len(teachers) < 2,
                "`teacher_model` is a dict with one teacher",
                "expected at least two names, which rows have in a column 'teacher'; or pass the teacher itself",
            ),
            ("" in teachers, "`teacher_model` has an empty name", "expected one that a column 'teacher' can contain"),
            (
                unknown := sorted({*urls} - {*teachers}),
                f"`teacher_server_url` has servers for {unknown}",
                f"the teachers are {sorted(teachers)}; use their names",
            ),
            (
                objects,
                f"`teacher_server_url` with teachers that are no paths, {objects}",
                "pass the path or model id of its checkpoint, from which its head is loaded",
            ),
        ]
    )
    for name, one in teachers.items() if is_given else ():
        _check_one(one, student, "`teacher_model`" if len(teachers) == 1 else f"`teacher_model[{name!r}]`")


def _check_one(teacher: Any, student: Any, called: str) -> None:
    is_shared = (teacher is student and not isinstance(student, str)) or share_memory(teacher, student)
    why = "it would be trained too; load the teacher as a separate object, or set `teacher_model_kind`"
    refuse([(is_shared, f"{called} shares parameters with the student", why)])
    if not isinstance(teacher, TeacherLike) and not (isinstance(teacher, nn.Module) and is_peft(teacher)):
        raise TypeError(
            f"{called} is a {type(teacher).__name__}: expected a path, a `PreTrainedModel`, a `PeftModel`, a "
            "`trl_opsd.Teacher`, or a dict of them by name."
        )
    model = teacher.model if isinstance(teacher, FrozenTeacher) else teacher
    what = f"{called} computes with the quantised weights of an earlier training"
    why = "load the teacher anew, or from the folder `quantized` of a save if it is to teach quantised"
    refuse([(isinstance(model, nn.Module) and fake_quantized(model), what, why)])


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
    tokenizer: PreTrainedTokenizerBase, teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> None:
    """Refuses teachers whose tokenizer maps ids differently than the student's, before a teacher is loaded."""
    for name, (theirs, source) in tokenizers_of(teachers, given, args).items():
        if theirs is not None:
            check_token_maps(tokenizer, theirs, name, source)


def tokenizers_of(
    teachers: Mapping[str, Any], given: Any, args: OPSDConfig
) -> dict[str, tuple[PreTrainedTokenizerBase | None, str | None]]:
    """The tokenizer of each teacher, or `None`, and where it is kept if the teacher was loaded from there."""
    unknown = sorted({*given} - {*teachers}) if isinstance(given, Mapping) else []
    why = f"the teachers are {sorted(teachers)}; use their names"
    refuse([(unknown, f"`teacher_processing_class` has {unknown}", why)])
    # Without a given tokenizer, the one at the teacher's path or where the object was loaded from.
    found: dict[str, tuple[PreTrainedTokenizerBase | None, str | None]] = {}
    for name, teacher in teachers.items():
        theirs, source = given.get(name) if isinstance(given, Mapping) else given, None
        if theirs is None and isinstance(teacher, str):
            path, options = tokenizer_at(teacher, location(args))
            if has_tokenizer(path, place_of(options)):
                theirs = AutoTokenizer.from_pretrained(path, **options)
            else:
                logger.warning(f"{path} has no tokenizer: assuming the student's.")
        elif theirs is None and (kept := _loaded_from(teacher, args)) is not None:
            source, options = kept
            try:
                theirs = AutoTokenizer.from_pretrained(source, **options)
            except (OSError, ValueError) as error:
                logger.warning(
                    f"The tokenizer of the {name} cannot be loaded from {source} ({str(error).splitlines()[0]}), and "
                    "is not compared with the student's: pass it as `teacher_processing_class`."
                )
        found[name] = theirs and text_tokenizer(theirs), source
    return found


def _loaded_from(teacher: Any, args: OPSDConfig) -> tuple[str, dict[str, Any]] | None:
    """Where a model was loaded from, and how files there are read without the network; `None` without a tokenizer."""
    model, here = teacher.model if isinstance(teacher, FrozenTeacher) else teacher, {"local_files_only": True}
    path = get_config_model_id(without_peft(model).config) if isinstance(model, nn.Module) else None
    found = {**here, "trust_remote_code": args.teacher_trust_remote_code}
    return (path, found) if path and has_tokenizer(path, here) else None


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
            kept, config = _loaded_from(model, args), without_peft(model).config
            theirs = None if kept is None else processor_at(*kept)
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
