"""A teacher in host memory whose layers are copied to the device one by one; while one computes, the next is copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, call
from trl_opsd.teacher.hosted import HeadOnDevice
from trl_opsd.teacher.parts import parts_of
from trl_opsd.teacher.placement import Placement
from trl_opsd.teacher.prefetch import HostBlock, Prefetcher
from trl_opsd.types import OutputHead


class Streamed(Placement):
    """`teacher_offload="stream"`: never more on the device than two layers, the head, and what belongs to no layer.

    Embeddings that are not tied to the head stay on the host and are looked up there: copying the result costs far less
    than copying the table.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher, on any device; its weights move to host memory, pinned where that helps.
        device (`torch.device`):
            Where it runs.

    Attributes:
        prefetcher ([`~teacher.prefetch.Prefetcher`]): copies the weights and counts the bytes.

    Raises:
        ValueError: The model does not keep its layers in a `ModuleList`.
    """

    is_whole = False
    passes_cost = True

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model, self.device, self.prefetcher = model, device, Prefetcher(device)
        parts = parts_of(model)
        if not parts.layers:
            raise ValueError(
                f"`teacher_offload='stream'`: {type(model).__name__} does not keep its layers in a "
                "`torch.nn.ModuleList`, so they cannot be streamed one by one: set `teacher_offload='cpu'`."
            )
        pinned = self.prefetcher.wants_pinned
        self._layers = [layer for layer, _ in parts.layers]
        self._blocks = [HostBlock(own, pinned) for _, own in parts.layers]
        self._rest = HostBlock(parts.rest, pinned)
        self._head = HeadOnDevice(model, parts.head, self.prefetcher)
        self._looks_up_on_host = bool(parts.embedding)
        HostBlock(parts.embedding, pinned=False)  # moves its tensors to host memory, where they stay

    @property
    def where(self) -> str:
        return f"in host memory, copied to {self.device} layer by layer"

    @property
    def head(self) -> OutputHead:
        return self._head.head

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        largest = max(block.nbytes for block in self._blocks)
        sizes = [self._rest.nbytes, *[largest] * min(2, len(self._blocks))]
        with self.prefetcher.borrow(sizes) as (rest, *slots), self._head.in_use():
            buffers = _DoubleBuffer(self._blocks, slots, self.prefetcher, visits=passes * len(self._blocks))
            hooks = self._hooks(buffers)
            try:
                self.prefetcher.fetch(self._rest, rest)
                self._rest.point_to(rest)
                self.prefetcher.wait_for_copies()
                yield partial(call, self.model)
            finally:
                for hook in hooks:
                    hook.remove()
                for block in (*self._blocks, self._rest):
                    block.restore()

    def passes_to_run(self, passes: int) -> int:
        return passes

    def _hooks(self, buffers: _DoubleBuffer) -> list[Any]:
        hooks = []
        for number, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(lambda *_, number=number: buffers.enter(number)))
            hooks.append(layer.register_forward_hook(lambda *_, number=number: buffers.leave(number)))
        if self._looks_up_on_host:
            embedding: nn.Module = self.model.get_input_embeddings()
            hooks.append(embedding.register_forward_pre_hook(lambda _, ids: tuple(one.cpu() for one in ids)))
            hooks.append(embedding.register_forward_hook(lambda _, __, found: found.to(self.device)))
        return hooks


class _DoubleBuffer:
    """Two slots that layers occupy in turn.

    Layers are expected in order, pass after pass. One that is called out of order is fetched at that moment.
    """

    def __init__(self, blocks: list[HostBlock], slots: list[Tensor], prefetcher: Prefetcher, visits: int) -> None:
        self._blocks, self._slots, self._prefetcher = blocks, slots, prefetcher
        self._holds: list[int | None] = [None for _ in slots]
        self._visits_left = visits
        self._computing = len(slots) - 1

    def enter(self, layer: int) -> None:
        """Before a layer computes: waits for its weights and starts the copy of the next."""
        self._fetch(layer)
        self._prefetcher.wait_for_copies()
        self._computing = self._holds.index(layer)
        self._blocks[layer].point_to(self._slots[self._computing])
        self._visits_left -= 1
        if self._visits_left > 0:
            self._fetch((layer + 1) % len(self._blocks))

    def leave(self, layer: int) -> None:
        """After a layer has been issued."""
        self._blocks[layer].restore()

    def _fetch(self, layer: int) -> None:
        if layer in self._holds:
            return
        # Not into the slot that is in use: a copy waits only for work issued so far.
        slot = (self._computing + 1) % len(self._slots)
        self._holds[slot] = layer
        self._prefetcher.fetch(self._blocks[layer], self._slots[slot])
