"""Finds out whether a teacher is made of the student's own tensors, whatever objects they hide in."""

from __future__ import annotations

from typing import Any

from torch import nn

from trl_opsd._compat.peft import CausalLM
from trl_opsd.teacher.base import Teacher


def share_memory(teacher: Any, student: CausalLM) -> bool:
    """Whether one optimizer step of the student could change the teacher, or freezing the teacher the student.

    Args:
        teacher (`Any`):
            A model, a teacher that keeps models in its attributes, or something without weights yet.
        student (`Any`):
            A model, or something without weights yet.
    """
    models = [teacher, *vars(teacher).values()] if isinstance(teacher, Teacher) else [teacher]
    theirs = {place for one in models if isinstance(one, nn.Module) for place in _places(one)}
    return isinstance(student, nn.Module) and not theirs.isdisjoint(_places(student))


def _places(model: nn.Module) -> set[tuple[str, int]]:
    """What tells parameters apart: objects, and addresses, as one object may be made of the memory of another."""
    parameters = list(model.parameters())
    addresses = {("address", parameter.data_ptr()) for parameter in parameters if not parameter.is_meta}
    nowhere = {("address", 0)}  # what ZeRO-3 has split
    return {("object", id(parameter)) for parameter in parameters} | addresses - nowhere
