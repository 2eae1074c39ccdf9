"""A teacher in host memory that comes to the device whole, and only while it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trl_opsd.models.backbone import Run, call
from trl_opsd.teacher.dock import Dock, Pack
from trl_opsd.teacher.parts import parts_of
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead


class Hosted(Placement):
    """`teacher_offload="cpu"`: between readings only a copy of the head is on the device.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher, anywhere; its weights move to host memory, pinned where that helps.
        device (`torch.device`):
            Where it reads.

    Attributes:
        dock ([`~dock.Dock`]): counts the bytes.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device, self.dock = model, device, Dock(device)
        parts = parts_of(model)
        groups = [parts.embedding, *(own for _, own in parts.layers), parts.rest]
        self._packs = [Pack(group, pinned=self.dock.wants_pinned) for group in groups]
        self._head = HeadOnDevice(model, parts.head, self.dock)

    @property
    def head(self) -> OutputHead:
        return self._head.head

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        with self.dock.borrow([pack.nbytes for pack in self._packs]) as buffers, self._head.lent():
            try:
                for pack, buffer in zip(self._packs, buffers, strict=True):
                    self.dock.fetch(pack, buffer)
                    pack.lend(buffer)
                self.dock.arrive()
                yield partial(call, self.model)
            finally:
                for pack in self._packs:
                    pack.take_back()

    def agreed(self, passes: int) -> int:
        return passes


class HeadOnDevice:
    """A copy of a head that stays on the device, because the loss needs it when the teacher is away.

    It is made anew for each reading, so that it fits the hidden states even if the masters change in between.
    """

    def __init__(self, model: Any, tensors: list[Tensor], dock: Dock) -> None:
        self._model, self._dock = model, dock
        self._pack = Pack(tensors, pinned=dock.wants_pinned)
        self._buffer = dock.keep(self._pack.nbytes)
        dock.fetch(self._pack, self._buffer)
        dock.arrive()

    @property
    def head(self) -> OutputHead:
        """The head of the model, with the copy's weight and bias."""
        weight, *bias = self._pack.views(self._buffer)
        return replace(OutputHead.of(self._model), weight=weight, bias=bias[0] if bias else None)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Copies the head anew and lets the model use the copy."""
        try:
            self._dock.fetch(self._pack, self._buffer)
            self._pack.lend(self._buffer)
            yield
        finally:
            self._pack.take_back()
