"""Detects whether a teacher shares tensors with the student, whatever objects hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from trl_opsd._compat.peft import CausalLM
from trl_opsd.teacher.base import Teacher


def share_memory(teacher: Any, student: CausalLM) -> bool:
    """Whether training the student would change the teacher, or freezing the teacher freeze the student."""
    # By address too, as two modules may hold views of one tensor.
    theirs = {place for one in _models(teacher) for place in _places(one)}
    return bool(theirs) and isinstance(student, nn.Module) and not theirs.isdisjoint(_places(student))


def _models(teacher: Any) -> Iterator[nn.Module]:
    """The models inside a teacher, which may hold other teachers."""
    if isinstance(teacher, nn.Module):
        yield teacher
    elif isinstance(teacher, Teacher):
        for one in vars(teacher).values():
            yield from _models(one)


def _places(model: nn.Module) -> set[tuple[str, int]]:
    """Identifies parameters by object and by address, as one parameter may be a view of another's memory."""
    parameters = list(model.parameters())
    addresses = {("address", parameter.data_ptr()) for parameter in parameters if not parameter.is_meta}
    sharded = {("address", 0)}  # ZeRO-3 leaves no local storage
    return {("object", id(parameter)) for parameter in parameters} | addresses - sharded
