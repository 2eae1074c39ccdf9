"""A teacher in host memory, copied to the device in full while it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, call
from trl_opsd.teacher.parts import parts_of
from trl_opsd.teacher.placement import Placement
from trl_opsd.teacher.prefetch import HostBlock, Prefetcher
from trl_opsd.types import OutputHead


class Hosted(Placement):
    """`teacher_offload="cpu"`: between uses only a copy of the head is on the device.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher, on any device; its weights move to host memory, pinned where that helps.
        device (`torch.device`):
            Where it runs.

    Attributes:
        prefetcher ([`~teacher.prefetch.Prefetcher`]): copies the weights and counts the bytes.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model, self.device, self.prefetcher = model, device, Prefetcher(device)
        parts = parts_of(model)
        groups = [parts.embedding, *(own for _, own in parts.layers), parts.rest]
        self._blocks = [HostBlock(group, pinned=self.prefetcher.wants_pinned) for group in groups]
        self._head = HeadOnDevice(model, parts.head, self.prefetcher)

    @property
    def where(self) -> str:
        return f"in host memory, copied to {self.device} while it reads"

    @property
    def head(self) -> OutputHead:
        return self._head.head

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        with self.prefetcher.borrow([block.nbytes for block in self._blocks]) as buffers, self._head.in_use():
            try:
                for block, buffer in zip(self._blocks, buffers, strict=True):
                    self.prefetcher.fetch(block, buffer)
                    block.point_to(buffer)
                self.prefetcher.wait_for_copies()
                yield partial(call, self.model)
            finally:
                for block in self._blocks:
                    block.restore()

    def passes_to_run(self, passes: int) -> int:
        return passes


class HeadOnDevice:
    """A copy of a head that stays on the device, because the loss needs it after the teacher has been offloaded.

    It is refreshed for each reading, so that it fits the hidden states even if the masters change in between.
    """

    def __init__(self, model: CausalLM, tensors: list[Tensor], prefetcher: Prefetcher) -> None:
        self._model, self._prefetcher = model, prefetcher
        self._block = HostBlock(tensors, pinned=prefetcher.wants_pinned)
        self._buffer = prefetcher.keep(self._block.nbytes)
        prefetcher.fetch(self._block, self._buffer)
        prefetcher.wait_for_copies()

    @property
    def head(self) -> OutputHead:
        """The model's head, with the weight and bias of the copy."""
        weight, *bias = self._block.views(self._buffer)
        return replace(OutputHead.of(self._model), weight=weight, bias=bias[0] if bias else None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Refreshes the copy and points the model's head to it."""
        try:
            self._prefetcher.fetch(self._block, self._buffer)
            self._block.point_to(self._buffer)
            yield
        finally:
            self._block.restore()
