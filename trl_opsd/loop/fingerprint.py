"""Fingerprints a run (objective, models, data order) as JSON, so that a resumed run can be compared with it.

Also what targets on disk were made for, which a run is compared with in the same way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from accelerate.logging import get_logger
from transformers import ProcessorMixin
from transformers.training_args import OptimizerNames

from trl_opsd._compat.peft import CausalLM, without_peft
from trl_opsd._compat.trl import get_config_model_id
from trl_opsd._compat.urls import server_urls
from trl_opsd.config import OPSDConfig
from trl_opsd.data.images import settings_of
from trl_opsd.losses import Divergence
from trl_opsd.losses.divergence import describe
from trl_opsd.models.backbone import model_shape, shape_of
from trl_opsd.models.weights import Samples, digest, sample
from trl_opsd.options.table import resumed
from trl_opsd.teacher import FrozenTeacher, Teacher
from trl_opsd.teacher.base import innermost
from trl_opsd.teacher.stored import StoredTeacher

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer

logger = get_logger(__name__)

FILE = "opsd_fingerprint.json"
"""The fingerprint's file in a checkpoint."""

NESTED = ("adapter", "teacher_weights")
"""Entries that are compared key by key, over the keys both sides have: a newer version of a library may add some, and
of a teacher behind a server only the head is known."""

Fingerprint: TypeAlias = dict[str, Any]
"""JSON-serialisable values by their names in messages; an option has its own name."""


def fingerprint(
    args: OPSDConfig, divergence: Divergence, chat_template: Any, verbs: Mapping[str, Any], **more: Any
) -> Fingerprint:
    """The options that a resume compares, objective and template, and the caller's entries, as read back from JSON.

    `more["functions"]` are described at construction, since a call may change them; `verbs` are overridden methods.
    """
    own = {} if type(divergence).__module__.startswith("trl_opsd.") else {"divergence": type(divergence)}
    values = {
        **{name: getattr(args, name) for name in resumed(type(args))},
        **more,
        "divergence": describe(divergence),
        "chat_template": None if chat_template is None else _hashed(str(chat_template)),
        "functions": {**more["functions"], **{name: describe_function(one) for name, one in {**verbs, **own}.items()}},
    }
    return dict(json.loads(json.dumps(values, default=str)))


def describe_student(student: CausalLM, handed_in: Samples | None) -> str:
    """The student's class, the shape of its head, and a digest of `handed_in`, samples of the weights under an adapter.

    Checkpoints omit those; without an adapter they have all weights.
    """
    shape = f"{type(without_peft(student)).__name__} {list(model_shape(student))}"
    return shape if handed_in is None else f"{shape}, {digest(handed_in)}"


def describe_optimizer(given: Any, args: OPSDConfig) -> str:
    """The class of a passed optimizer, else the value of `optim` without `_fused`, which has the same state."""
    if given is not None:
        return type(given).__qualname__
    return str(OptimizerNames(args.optim).value).removesuffix("_fused")


def describe_processor(processor: ProcessorMixin | None) -> str | None:
    """The class of a processor and a digest of its settings: it makes the tokens of an image."""
    settings = settings_of(processor)
    return None if settings is None else f"{settings['class']}, {_hashed(json.dumps(settings, default=str))}"


def _hashed(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def of_teachers(teachers: Mapping[str, Teacher], args: OPSDConfig, base: Samples | None = None) -> Fingerprint:
    """The entries of the teachers, as they were loaded. Collective.

    `teachers` has the last part of the path of each (a folder may have moved) and the shape of its head; of one that
    follows the student the path is left out, as it is restored from the checkpoint. `teacher_weights` has a digest of
    the weights of each that are its own and frozen, and of its head; where servers are is no part of it, as a run may
    go on with others, or with the teacher in the process.
    """
    kind, served = args.teacher_model_kind, server_urls("teacher_server_url", args.teacher_server_url)
    described = {}
    beside = {name: f", {said}" for name, one in teachers.items() if (said := getattr(one, "form", None))}
    teachers = {name: innermost(one) for name, one in teachers.items()}
    for name, teacher in teachers.items():
        if isinstance(teacher, StoredTeacher):
            described[name] = teacher.said["is"]
            continue
        source = teacher if kind in ("ema", "live") else getattr(teacher, "model", teacher)
        path = get_config_model_id(source.config) if hasattr(source, "config") else ""
        if isinstance(teacher, FrozenTeacher):
            path = teacher.placement.adapter or path
        described[name] = (
            f"{Path(path).name or type(source).__name__} {list(shape_of(teacher.head))}{beside.get(name, '')}"
        )
    frozen = {name: one for name, one in teachers.items() if isinstance(one, FrozenTeacher) and kind != "ema"}
    known = {name: one.head for name, one in teachers.items() if name in frozen or name in served}
    heads = {f"head of {name}": digest({"head": sample(head.weight)}) for name, head in known.items()}
    weights = {name: digest(one.placement.samples()) for name, one in frozen.items()}
    if kind == "base" and base is not None:  # of the weights under the student's adapter, which teach
        weights.update({name: digest(base) for name in teachers if name not in frozen})
    for one in teachers.values():
        weights.update(one.said["weights"] if isinstance(one, StoredTeacher) else {})
    return {"teachers": described, "teacher_weights": {**weights, **heads}}


def describe_function(function: Any) -> str:
    """The name of an object of the user's, and its `__version__` if it has one. Its code is not compared."""
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    version = getattr(inner, "__version__", None)
    return name if version is None else f"{name}, version {version}"


def write(folder: str | Path, now: Fingerprint) -> None:
    """Writes a fingerprint into a checkpoint."""
    (Path(folder) / FILE).write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


def check(folder: str | Path, now: Fingerprint, accepted: Sequence[str] = ()) -> None:
    """Refuses a checkpoint whose fingerprint differs from that of this run, before anything is loaded.

    One that TRL wrote has no fingerprint and is accepted with a warning. A difference in an accepted name is only a
    warning.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        logger.warning(f"{folder} has no {FILE}, so its objective and order of rows could not be compared.")
        return
    differing = _differing(json.loads(path.read_text(encoding="utf-8")), now)
    if refused := {name: line for name, line in differing.items() if name not in accepted}:
        raise ValueError(
            f"This run differs from the one that saved {folder}:\n"
            + "\n".join(refused.values())
            + f"\nRestore them, or accept the changes with `resume_with_changes={sorted(differing)}`."
        )
    if differing:
        logger.warning("Resuming with changes:\n" + "\n".join(differing.values()))


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """A line with both values for each entry of the checkpoint that differs."""
    differing = {}
    for name, before in sorted(then.items()):
        after = now.get(name, "not recorded")
        if isinstance(before, dict) and isinstance(after, dict):
            common = [part for part in before if part in after and name in NESTED]
            parts = [part for part in common or {**before, **after} if before.get(part) != after.get(part)]
            before, after = ({part: one.get(part) for part in parts} for one in (before, after))
        if before != after:
            differing[name] = f"  {name}: {before!r} in the checkpoint, {after!r} now"
    if "teachers" in differing:
        differing.pop("teacher_weights", None)  # other teachers have other weights
    return differing


# ---- Targets on disk ------------------------------------------------------------------------------------------------


def made_for(host: OPSDTrainer) -> dict[str, str]:
    """What decides the tokens that teachers read, beside the rows."""
    args, tokenizer = host.args, host.processing_class
    values: dict[str, Any] = {
        "tokenizer": [type(tokenizer).__name__, *sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])],
        "chat_template": tokenizer.chat_template,
        "chat_template_kwargs": args.chat_template_kwargs,
        "teacher_chat_template_kwargs": args.teacher_chat_template_kwargs,
        "teacher_prompt_template": args.teacher_prompt_template,
    }
    return {name: "none" if not value else _hashed(json.dumps(value)) for name, value in values.items()}


def check_same(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses targets that were made for, or by, something else."""
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if names:
        lines = (f"  {name}: {then.get(name)!r} there, {now.get(name)!r} here" for name in names)
        raise ValueError(
            f"{str(folder)!r} has the targets of another run:\n" + "\n".join(lines) + "\nRestore these, or write the "
            "targets to another folder."
        )


def check_made_for(host: OPSDTrainer, teachers: Mapping[str, Teacher]) -> None:
    """Refuses targets on disk that were made for another tokenizer or template."""
    for teacher in teachers.values():
        if isinstance(teacher, StoredTeacher):
            check_same(teacher.store.folder, teacher.store.header["made_for"], made_for(host))
            teacher.decode = host.processing_class.decode
