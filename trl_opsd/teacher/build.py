"""Builds teachers from what a user passes, with the placement that `teacher_offload` names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_fsdp_enabled

from trl_opsd._compat.deepspeed import loading, reader_config, recompute_buffers
from trl_opsd._compat.peft import CausalLM, is_peft, without_adapter
from trl_opsd._compat.sharding import broadcast_from_first, in_zero3_model, trained_parameters, whole, whole_copy
from trl_opsd._compat.torchao import copy_quantizers, restore, unquantized
from trl_opsd._compat.trl import create_model_from_path
from trl_opsd.config import OPSDConfig
from trl_opsd.losses import Divergence
from trl_opsd.models.backbone import model_shape
from trl_opsd.models.checks import Adapter, adapter_at, sizes, whole_checkpoint, whole_on
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.models.weights import sample
from trl_opsd.options.rules import refuse
from trl_opsd.teacher.adapters import Adapted, borrow
from trl_opsd.teacher.base import Teacher, innermost
from trl_opsd.teacher.checks import LOCATION_OPTIONS, TeacherLike, deadline, location, servers, teacher_loading
from trl_opsd.teacher.frozen import FrozenTeacher, Placement, Resident, is_fixed
from trl_opsd.teacher.offloaded import Hosted, Sharded, Streamed
from trl_opsd.teacher.prefix import SharedPrefix
from trl_opsd.teacher.self_teacher import Average, OwnTeacher, check_base, unchanged
from trl_opsd.teacher.teachers import Teachers
from trl_opsd.types.known import TokenHead

_PLACEMENTS: dict[str, Callable[..., Placement]] = {
    "none": Resident,
    "cpu": Hosted,
    "stream": Streamed,
    "zero3": Sharded,
}
"""Placement by `teacher_offload`."""


def build_teacher(
    teacher_model: TeacherLike, args: OPSDConfig, is_only: bool = True, prefix_bytes: float = 0
) -> Teacher:
    """A frozen teacher from a path or a model, placed as `args.teacher_offload` says; a [`Teacher`] stays as it is.

    One that is offloaded keeps its head on the device if it is the only one.
    """
    if isinstance(teacher_model, Teacher):
        return teacher_model
    if isinstance(teacher_model, str):
        teacher_model = _loaded(teacher_model, args, location(args))
    elif in_zero3_model(teacher_model):
        raise ValueError(
            "The teacher was sharded by the student's ZeRO-3 config when it was loaded: pass its path, so that "
            "`teacher_offload` decides, or load it before the config is built."
        )
    return _frozen(_placed(teacher_model, args, is_only), args, prefix_bytes)


def average_of(paths: Sequence[str], args: OPSDConfig) -> CausalLM:
    """The mean of the weights of checkpoints, in float32 and host memory; adapters are merged into their bases first.

    Raises:
        ValueError: The checkpoints differ in the names or shapes of their weights.
    """
    sums: dict[str, Tensor] = {}
    for path in paths:
        adapter = adapter_at(path, location(args))
        where = (path, location(args)) if adapter is None else (adapter.base, adapter.loading_of_base)
        model: Any = _loaded(where[0], args, where[1], in_host_memory=True)
        if adapter is not None:
            model = adapter.put_on(model, "expert").merge_and_unload()
        weights = {name: one.data for name, one in model.float().named_parameters()}
        shapes = [{name: one.shape for name, one in of.items()} for of in (weights, sums)]
        refuse([(sums and shapes[0] != shapes[1], f"{path} and {paths[0]}", "their weights differ in names or shapes")])
        for name, one in sums.items():
            weights[name].add_(one)
        sums = weights
    for one in sums.values():
        one.div_(len(paths))
    return model


def build_teachers(
    models: Mapping[str, Any], host: Any, wrap: Callable[[str, Teacher], Teacher] | None = None
) -> Teachers:
    """All teachers of a trainer by name, from what was passed for each; `None` is the student itself.

    `wrap` makes another of each teacher, by its name.
    """
    student, args, handed_in, reads = host.model, host.args, host.base_samples, host.methods.reads
    # `handed_in` are samples of the weights under the student's adapter, which a base teacher needs unchanged.
    is_base, checked = args.teacher_model_kind == "base", None
    if handed_in is not None and (is_base or "origin" in reads):
        need = "`teacher_model_kind='base'` is" if is_base else "`Anchor` and `Extrapolation` need"
        checked = check_base(student, handed_in, need)
    urls, device, progress = servers(args), args.teacher_cache_device, _progress(args)

    def policy() -> BatchPolicy:
        return host.batching_to_learn  # of a sharded student known only later

    own = partial(OwnTeacher, student, host.in_student, policy=policy, cache_device=device, progress=progress)
    prefix_bytes = args.teacher_prefix_cache_gb * 1e9 / (len(models) + ("origin" in reads))
    adapters = {name: one for name, model in models.items() if (one := adapter_at(model, location(args))) is not None}
    is_only = len(models) - len(adapters) + len({one.base for one in adapters.values()}) == 1
    placements, borrows = _placed_adapters(adapters, student, args, is_only)
    teachers: dict[str, Teacher] = {}
    average: Average | None = None
    for name, model in models.items():
        if model is None:
            teachers[name], average = _build_own(own, student, args, prefix_bytes)
        elif name in urls:
            teachers[name] = served(model, urls[name], args, host.divergence, student, host.processing_class)
        elif name in placements:
            teachers[name] = _frozen(placements[name], args, prefix_bytes)
        else:
            teachers[name] = build_teacher(model, args, is_only, prefix_bytes)
    if wrap is not None:
        teachers = {name: wrap(name, one) for name, one in teachers.items()}
    origin: Teacher | None = None
    if "origin" in reads:
        origin = next(iter(teachers.values())) if is_base else _build_base(own, student, args, prefix_bytes)
    checks = [one for one in (checked, borrows) if one is not None]
    _check_whole(teachers, host)
    asks_student = any(getattr(one, "student_k", 0) for one in teachers.values())
    return Teachers(teachers, average, checks, origin, own(nullcontext) if asks_student else None)


def _check_whole(teachers: Mapping[str, Teacher], host: Any) -> None:
    """Refuses what needs a teacher's whole distribution where only some tokens are known."""
    known = [name for name, one in teachers.items() if isinstance(innermost(one).head, TokenHead)]
    args, divergence = host.args, host.divergence
    temperature = args.teacher_temperature or args.temperature
    needs = {
        "methods": next((type(one).__name__ for one in host.methods if one.needs_whole), None),
        "teacher_temperature": None if temperature == 1 else temperature,
        "kl_clip": args.kl_clip,
        "top_k_teacher": args.top_k_teacher,
        "divergence": divergence if divergence.needs_whole else None,
    }
    if known and (name := next((name for name, value in needs.items() if value is not None), None)):
        raise ValueError(
            f"`{name}={needs[name]!r}` needs the whole distribution of each teacher, but {known[0]!r} gives "
            "log-probabilities of some tokens, at temperature 1: remove "
            f"it{' (or set 1 if `temperature` differs)' * (name == 'teacher_temperature')}, or use hidden states, from "
            "a pooling server or `trl-opsd targets` without `--top-k` (docs/teachers.md)."
        )


def _placed_adapters(
    adapters: Mapping[str, Adapter], student: CausalLM, args: OPSDConfig, is_only: bool
) -> tuple[dict[str, Placement], Callable[[], None] | None]:
    """The placement of each adapter by its teacher's name, and a check that weights of others have not changed.

    Frozen weights of the student, and of bases loaded here, are used where they equal those of a base.
    """
    is_split = args.deepspeed_plugin is not None or is_fsdp_enabled()
    shares = args.teacher_offload == "none"  # offloaded weights move
    # Compared in host memory, so that a base is never on the device twice.
    compares = shares and is_peft(student) and not is_split
    compares &= teacher_loading(args).keys().isdisjoint({"device_map", "quantization_config"})
    groups: dict[tuple[str, ...], dict[str, Adapter]] = {}
    for name, one in adapters.items():
        # PEFT puts adapters of one type only into the layers of a model.
        key = one.base, str(sorted(one.loading_of_base.items())), str(one.config.peft_type)
        groups.setdefault(key, {})[name] = one
    found: dict[str, Placement] = {}
    borrowed: dict[str, Tensor] = {}
    others = [student] * compares
    for group in groups.values():
        first = next(iter(group.values()))
        model: CausalLM = _loaded(first.base, args, first.loading_of_base, in_host_memory=compares)
        mine = borrow(model, others) if shares else {}
        borrowed |= mine
        names = {name: f"teacher{number:03}" for number, name in enumerate(group)}
        for name, one in group.items():
            model = one.put_on(model, names[name])
        with model.disable_adapter():  # the head that is kept apart is the base's
            shared = _placed(model, args, is_only)
        others.append(model)
        owners = f"; {len(group)} teachers share its base" if len(group) > 1 else ""
        owners += f"; {sizes({id(one): one for one in mine.values()}.values())} of it are others'" if mine else ""
        found |= {name: Adapted(shared, names[name], one.path, owners) for name, one in group.items()}
    if not borrowed:
        return found, None
    who = "a teacher, an adapter of the same base, uses it (with `teacher_offload='cpu'` a copy)"
    return found, unchanged(lambda: {name: sample(one) for name, one in borrowed.items()}, who)


def _build_own(
    own: Callable[..., OwnTeacher], student: CausalLM, args: OPSDConfig, prefix_bytes: float
) -> tuple[Teacher, Average | None]:
    """The student in another state as its teacher (`args.teacher_model_kind`), and its moving average if any."""
    if args.teacher_model_kind == "base":
        return _build_base(own, student, args, prefix_bytes), None
    if args.teacher_model_kind == "live":
        return own(nullcontext), None
    averaged = partial(
        Average, partial(trained_parameters, student), rate=args.teacher_update_rate, every=args.teacher_sync_steps
    )
    # An average covers what is trained; everything else is the same in student and teacher.
    followed = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    if is_peft(student):
        if others := [name for name in followed if "lora_" not in name]:
            raise ValueError(
                f"`teacher_model_kind='ema'` averages LoRA weights only, but {others[0]!r} is trainable too: use a "
                "plain `LoraConfig`, or 'base' or 'live'."
            )
        adapter = {name: whole(parameter).clone() for name, parameter in followed.items()}
        # Random initialisation may differ between processes until DDP wraps the student.
        broadcast_from_first(adapter, args.device)
        average = averaged(adapter)
        return own(average.swapped_in, kept=adapter.values()), average
    teacher = _copied(student, args)
    copy_quantizers(student, teacher.model)
    parameters = dict(teacher.model.named_parameters())
    return teacher, averaged({name: parameters[name] for name in followed})


def _build_base(own: Callable[..., OwnTeacher], student: CausalLM, args: OPSDConfig, prefix_bytes: float) -> Teacher:
    """The student as it was passed: without its adapter and not quantised, or a copy."""
    if is_peft(student):
        prefix = SharedPrefix(student, prefix_bytes, args.device) if prefix_bytes else None
        return own(partial(_as_passed, student), prefix=prefix)
    teacher = _copied(student, args, prefix_bytes)
    restore(teacher.model)
    return teacher


@contextmanager
def _as_passed(student: CausalLM) -> Iterator[None]:
    with without_adapter(student), unquantized(student):
        yield


def _copied(student: CausalLM, args: OPSDConfig, prefix_bytes: float = 0) -> FrozenTeacher:
    copied = whole_copy(student)
    broadcast_from_first(copied.state_dict(), args.device)
    return _frozen(_placed(copied, args, is_only=True), args, prefix_bytes)


def _progress(args: OPSDConfig) -> bool:
    return args.process_index == 0 and not args.disable_tqdm


def _placed(model: CausalLM, args: OPSDConfig, is_only: bool) -> Placement:
    offload, fixed = args.teacher_offload, is_fixed(model)
    what = f"`teacher_offload={offload!r}` with a teacher that is quantised or was loaded with a device map"
    refuse([(offload != "none" and fixed, what, "its weights cannot be moved; set 'none', or load it without")])
    of_head = {"keeps_head": is_only} if args.teacher_offload in ("cpu", "stream") else {}
    return _PLACEMENTS[args.teacher_offload](model, args.device, **of_head)


def _frozen(placement: Placement, args: OPSDConfig, prefix_bytes: float) -> FrozenTeacher:
    return FrozenTeacher(
        placement,
        cache_device=args.teacher_cache_device,
        progress=_progress(args),
        padding_free=args.padding_free,
        pad_to_multiple_of=args.pad_to_multiple_of,
        prefix_bytes=prefix_bytes,
    )


def served(
    path: str,
    url: str,
    args: OPSDConfig,
    divergence: Divergence,
    student: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
) -> Teacher:
    """A teacher behind a server, which all processes have found to be the same."""
    # These need aiohttp, which may be absent where no server is used.
    from trl_opsd.teacher.answers import Answers, States, Tokens
    from trl_opsd.teacher.served import ServedTeacher, chosen_targets
    from trl_opsd.teacher.servers import TeacherServer

    server, place = TeacherServer(url, deadline(args), args.teacher_server_timeout), location(args)
    targets: str | None = args.teacher_server_targets
    if targets != "states":
        server.look(tokenizer)
        targets = targets or chosen_targets(server.limits, divergence)
    answers: Answers
    if targets == "states":
        answers = States(path, place, args.device)
    else:
        of_student = model_shape(student)[0]
        answers = Tokens(server, targets, path, place, args.device, of_student, args.teacher_server_top_k)
    teacher = ServedTeacher(path, server, answers, args.teacher_cache_device, _progress(args))
    teacher.check_predictions(place)
    return teacher


def _loaded(path: str, args: OPSDConfig, place: Mapping[str, Any], in_host_memory: bool = False) -> PreTrainedModel:
    """Loads a teacher, or the base of its adapter, from a path directly to its placement, or else to host memory."""
    others = {name: one for name, one in teacher_loading(args).items() if name not in LOCATION_OPTIONS}
    kwargs = {"dtype": None, "use_safetensors": True, **others, **place}
    config = None
    if args.teacher_offload == "zero3" and not in_host_memory:
        theirs = AutoConfig.from_pretrained(path, **place)
        dtype = getattr(torch, str(kwargs["dtype"]).removeprefix("torch."), None) or theirs.dtype or torch.float32
        config = reader_config(dtype, theirs.get_text_config().hidden_size, args.device)
    if in_host_memory or args.teacher_offload != "none":
        kwargs["device_map"] = None
    elif args.distributed_state.distributed_type != DistributedType.NO:
        kwargs["device_map"] = {"": args.device}
    else:
        kwargs = {**whole_on(args.device), **kwargs}
    with loading(config), whole_checkpoint("teacher_model"):
        model: PreTrainedModel = create_model_from_path(path, **kwargs)
    if config is not None:
        recompute_buffers(model)
    return model
