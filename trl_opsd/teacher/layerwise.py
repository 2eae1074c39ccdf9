"""A teacher in host memory whose layers visit the device one by one; while one computes, the next arrives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trl_opsd.models.backbone import Run, call
from trl_opsd.teacher.dock import Dock, Pack
from trl_opsd.teacher.hosted import HeadOnDevice
from trl_opsd.teacher.parts import parts_of
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead


class Streamed(Placement):
    """`teacher_offload="stream"`: never more on the device than two layers, the head, and what belongs to no layer.

    Embeddings that are not tied to the head stay on the host and are looked up there: moving what was looked up costs
    far less than the table.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher, anywhere; its weights move to host memory, pinned where that helps.
        device (`torch.device`):
            Where it reads.

    Attributes:
        dock ([`~dock.Dock`]): counts the bytes.

    Raises:
        ValueError: The model keeps its layers in no `ModuleList`.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device, self.dock = model, device, Dock(device)
        parts = parts_of(model)
        if not parts.layers:
            raise ValueError(
                f"`teacher_offload='stream'`: {type(model).__name__} keeps its layers in no `torch.nn.ModuleList`, so "
                "there is nothing to stream one by one: set `teacher_offload='cpu'`."
            )
        pinned = self.dock.wants_pinned
        self._layers = [layer for layer, _ in parts.layers]
        self._packs = [Pack(own, pinned) for _, own in parts.layers]
        self._rest = Pack(parts.rest, pinned)
        self._head = HeadOnDevice(model, parts.head, self.dock)
        self._looks_up_on_host = bool(parts.embedding)
        Pack(parts.embedding, pinned=False)  # its tensors stay in it

    @property
    def head(self) -> OutputHead:
        return self._head.head

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        largest = max(pack.nbytes for pack in self._packs)
        sizes = [self._rest.nbytes, *[largest] * min(2, len(self._packs))]
        with self.dock.borrow(sizes) as (rest, *slots), self._head.lent():
            belt = _Belt(self._packs, slots, self.dock, visits=passes * len(self._packs))
            hooks = self._hooks(belt)
            try:
                self.dock.fetch(self._rest, rest)
                self._rest.lend(rest)
                self.dock.arrive()
                yield partial(call, self.model)
            finally:
                for hook in hooks:
                    hook.remove()
                for pack in (*self._packs, self._rest):
                    pack.take_back()

    def agreed(self, passes: int) -> int:
        return passes

    def _hooks(self, belt: _Belt) -> list[Any]:
        hooks = []
        for number, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(lambda *_, number=number: belt.enter(number)))
            hooks.append(layer.register_forward_hook(lambda *_, number=number: belt.leave(number)))
        if self._looks_up_on_host:
            embedding: nn.Module = self.model.get_input_embeddings()
            hooks.append(embedding.register_forward_pre_hook(lambda _, ids: tuple(one.cpu() for one in ids)))
            hooks.append(embedding.register_forward_hook(lambda _, __, found: found.to(self.device)))
        return hooks


class _Belt:
    """Two slots in which layers take turns.

    Layers are expected in their order, pass after pass. One that comes out of turn is fetched when it comes.
    """

    def __init__(self, packs: list[Pack], slots: list[Tensor], dock: Dock, visits: int) -> None:
        self._packs, self._slots, self._dock = packs, slots, dock
        self._holds: list[int | None] = [None for _ in slots]
        self._visits_left = visits
        self._computing = len(slots) - 1

    def enter(self, layer: int) -> None:
        """Before a layer computes: lets it wait for its weights, and sends for those of the next."""
        self._fetch(layer)
        self._dock.arrive()
        self._computing = self._holds.index(layer)
        self._packs[layer].lend(self._slots[self._computing])
        self._visits_left -= 1
        if self._visits_left > 0:
            self._fetch((layer + 1) % len(self._packs))

    def leave(self, layer: int) -> None:
        """After a layer was issued."""
        self._packs[layer].take_back()

    def _fetch(self, layer: int) -> None:
        if layer in self._holds:
            return
        # Never over a layer that computes: that one was issued before, but what comes after it was not.
        slot = (self._computing + 1) % len(self._slots)
        self._holds[slot] = layer
        self._dock.fetch(self._packs[layer], self._slots[slot])
