"""A teacher that is a causal language model held whole on the device, frozen for good."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from trl_opsd.backbone import completion_hidden, prove_head
from trl_opsd.teacher.base import Teacher
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

    def targets(self, rollout: Rollout) -> TeacherTargets:
        device = next(self.model.parameters()).device
        chunks = list(rollout.chunks(self._rows_per_pass))
        passes = tqdm(chunks, desc="teach", unit="pass", delay=5, leave=False, disable=not self._progress)
        hidden_BCH: Tensor | None = None
        read = 0
        with torch.no_grad():
            for chunk in passes:
                chunk_hidden = completion_hidden(self.model, chunk.to(device))
                if hidden_BCH is None:
                    shape = (*rollout.completion_ids.shape, chunk_hidden.size(-1))
                    hidden_BCH = chunk_hidden.new_empty(shape, device=rollout.completion_ids.device)
                # Copied, because the chunk is a view that would keep the hidden states of the prompts alive.
                hidden_BCH[read : read + len(chunk_hidden)] = chunk_hidden
                read += len(chunk_hidden)
        assert hidden_BCH is not None, "a generation batch has rows"
        return TeacherTargets(hidden=hidden_BCH)
