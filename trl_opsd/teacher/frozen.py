"""A teacher that is a causal language model held whole on the device, frozen for good."""

from __future__ import annotations

from typing import Any

from trl_opsd.backbone import context_of, prove_head
from trl_opsd.teacher.base import Teacher
from trl_opsd.teacher.forward import read
from trl_opsd.types import OutputHead, Rollout, TeacherTargets


class FrozenTeacher(Teacher):
    """Freezes a model and reads rollouts with it, a few rows at a time.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The teacher. It is put into eval mode and its parameters stop requiring gradients, for good. It stays on
            the device where it is.
        rows_per_pass (`int`):
            Rows of a generation batch read in one forward pass.
        progress (`bool`, *optional*, defaults to `False`):
            Show a progress bar when reading takes longer than a few seconds.

    Raises:
        ValueError: The model's logits cannot be rebuilt from its hidden states.
    """

    def __init__(self, model: Any, rows_per_pass: int, progress: bool = False) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self._rows_per_pass = rows_per_pass
        self._progress = progress
        prove_head(model, "teacher")

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.model)

    @property
    def context(self) -> int | None:
        return context_of(self.model)

    def targets(self, rollout: Rollout) -> TeacherTargets:
        device = next(self.model.parameters()).device
        return TeacherTargets(hidden=read(self.model, rollout, self._rows_per_pass, device, self._progress))
