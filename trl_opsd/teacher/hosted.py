"""A teacher in host memory, copied to the device while it scores; a layer waits for its own copy when it is called."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
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


class Offloaded(Placement):
    """Keeps only a copy of the head on the device between uses; a subclass says how many layers while it scores."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model, self.device, self.prefetcher = model, device, Prefetcher(device)
        parts = parts_of(model)  # their data moves to host memory, pinned where that helps
        self._layers = [layer for layer, _ in parts.layers]
        self._blocks = [HostBlock(own, device) for _, own in parts.layers]
        self._rest = HostBlock([*parts.embedding, *parts.rest], device)
        self._head = HeadOnDevice(model, parts.head, self.prefetcher)

    @property
    def head(self) -> OutputHead:
        return self._head.head

    @abstractmethod
    def buffer_sizes(self, layers: list[int]) -> list[int]:
        """Bytes of the buffers for layers of these sizes: one per layer, or two for all in turn."""

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        sizes = [self._rest.nbytes, *self.buffer_sizes([block.nbytes for block in self._blocks])]
        with self.prefetcher.borrow(sizes) as (rest, *buffers), self._head.in_use():
            # What belongs to no layer is needed from the first operation on.
            self.prefetcher.wait(self.prefetcher.fetch(self._rest, rest))
            self._rest.point_to(rest)
            arrivals = _Arrivals(self._blocks, buffers, self.prefetcher, visits=passes * len(self._blocks))
            hooks = [
                layer.register_forward_pre_hook(lambda *_, number=number: arrivals.enter(number))
                for number, layer in enumerate(self._layers)
            ]
            try:
                yield partial(call, self.model)
            finally:
                for hook in hooks:
                    hook.remove()
                for block in (*self._blocks, self._rest):
                    block.restore()

    def passes_to_run(self, passes: int) -> int:
        return passes


class Hosted(Offloaded):
    """`teacher_offload="cpu"`: the whole model is on the device while it scores."""

    @property
    def where(self) -> str:
        return f"in host memory, copied to {self.device} while it reads"

    def buffer_sizes(self, layers: list[int]) -> list[int]:
        return layers


class _Arrivals:
    """Prefetches layers in order, pass after pass; a layer that is called out of order is copied at that moment."""

    def __init__(
        self, blocks: Sequence[HostBlock], buffers: Sequence[Tensor], prefetcher: Prefetcher, visits: int
    ) -> None:
        self._blocks, self._buffers, self._prefetcher = blocks, buffers, prefetcher
        self._holds: list[int | None] = [None for _ in buffers]
        self._copies: list[torch.Event | None] = [None for _ in buffers]
        self._visits_left = visits
        self._computing = len(buffers) - 1
        if blocks:
            self._fetch(0)

    def enter(self, layer: int) -> None:
        """Before a layer computes: waits for its weights and prefetches the next layers."""
        self._fetch(layer)
        self._computing = self._holds.index(layer)
        self._prefetcher.wait(self._copies[self._computing])
        self._visits_left -= 1
        for ahead in range(1, min(len(self._buffers), self._visits_left + 1)):
            self._fetch((layer + ahead) % len(self._blocks))

    def _fetch(self, layer: int) -> None:
        # Already fetched or on its way.
        if layer in self._holds:
            return
        # Never into the buffer of the layer that computes: a copy waits only for work queued so far.
        place = layer if len(self._buffers) == len(self._blocks) else 1 - self._computing
        if (evicted := self._holds[place]) is not None:
            self._blocks[evicted].restore()
        self._holds[place] = layer
        self._copies[place] = self._prefetcher.fetch(self._blocks[layer], self._buffers[place])
        self._blocks[layer].point_to(self._buffers[place])


class HeadOnDevice:
    """A copy of a head that stays on the device, because the loss needs it after the teacher is offloaded."""

    def __init__(self, model: CausalLM, tensors: list[Tensor], prefetcher: Prefetcher) -> None:
        self._model, self._prefetcher = model, prefetcher
        self._block = HostBlock(tensors, prefetcher.device)
        self._buffer = prefetcher.keep(self._block.nbytes)
        prefetcher.wait(prefetcher.fetch(self._block, self._buffer))

    @property
    def head(self) -> OutputHead:
        """The model's head, with the weight and bias of the copy."""
        weight, *bias = self._block.views(self._buffer)
        return replace(OutputHead.of(self._model), weight=weight, bias=bias[0] if bias else None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Refreshes the copy and points the model's head to it."""
        try:
            # Refreshed for each scoring, so that it fits the hidden states even if the masters changed in between.
            self._prefetcher.wait(self._prefetcher.fetch(self._block, self._buffer))
            self._block.point_to(self._buffer)
            yield
        finally:
            self._block.restore()
