"""Targets on disk, as a trainer sees them: whether they were made for its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_opsd.teacher.stored import StoredTeacher
from trl_opsd.teacher.teachers import Teachers

if TYPE_CHECKING:
    from trl_opsd.trainer import OPSDTrainer


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
    return {
        name: "none" if not value else f"sha256 {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}"
        for name, value in values.items()
    }


def check_same(folder: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses targets that were made for, or by, something else."""
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if names:
        lines = (f"  {name}: {then.get(name)!r} there, {now.get(name)!r} here" for name in names)
        raise ValueError(
            f"{str(folder)!r} has the targets of another run:\n" + "\n".join(lines) + "\nRestore these, or write the "
            "targets to another folder."
        )


def check_made_for(host: OPSDTrainer, teachers: Teachers) -> None:
    """Refuses targets on disk that were made for another tokenizer or template."""
    for teacher in teachers.values():
        if isinstance(teacher, StoredTeacher):
            check_same(teacher.store.folder, teacher.store.header["made_for"], made_for(host))
            teacher.decode = host.processing_class.decode
