"""Weights in host memory, which come to the device for each pass: whole, layer by layer, or gathered by ZeRO-3."""

from __future__ import annotations

import mmap
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

from trl_opsd._compat.deepspeed import SplitReader, reader_config
from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, call, distinct, layer_list, numbers_in, tensors_of
from trl_opsd.teacher.frozen import Placement, max_over_processes
from trl_opsd.types import OutputHead
from trl_opsd.types.targets import has_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Each parameter and buffer of a causal language model, in exactly one list."""

    head: list[Tensor]
    """Weight and, if there is one, bias of the output head; tied embeddings are here too."""
    layers: list[tuple[nn.Module, list[Tensor]]]
    """The decoder layers in calling order, each with the tensors that only it holds."""
    rest: list[Tensor]
    """Tensors that belong to no layer, or to several: embeddings that are not the head's, the last norm, positions."""


def parts_of(model: CausalLM) -> Parts:
    """Divides the tensors of a causal language model into the groups that are moved together."""
    output = OutputHead.of(model)
    head = [tensor for tensor in (output.weight, output.bias) if tensor is not None]
    taken = {id(tensor) for tensor in head}
    layers = distinct(layer_list(model))
    # A tensor shared by several layers must be on the device for all of them: it goes with the rest.
    holders = Counter(id(tensor) for layer in layers for tensor in tensors_of(layer))
    own = [[one for one in tensors_of(layer) if holders[id(one)] == 1 and id(one) not in taken] for layer in layers]
    taken |= {id(tensor) for tensor in chain.from_iterable(own)}
    rest = [tensor for tensor in tensors_of(model) if id(tensor) not in taken]
    return Parts(head=head, layers=list(zip(layers, own, strict=True)), rest=rest)


_ALIGNMENT = 256
"""Bytes; the allocators' alignment, so that kernels treat a view like a tensor with its own storage."""


class HostBlock:
    """Tensors of a model in one piece of host memory, copied to the device by a single call."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self._tensors = list(tensors)
        self._starts, self.nbytes = [], 0
        for tensor in self._tensors:
            self._starts.append(self.nbytes)
            self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._host = _host_memory(self, self.nbytes, device)
        self._masters = self.views(self._host)
        for tensor, master in zip(self._tensors, self._masters, strict=True):
            master.copy_(tensor.data)
            tensor.data = master  # frees the tensor's own memory at once, so that the peak is one tensor higher

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of this block's tensors in a buffer that it was copied to."""
        spans = [buffer[start : start + one.nbytes] for start, one in zip(self._starts, self._tensors, strict=True)]
        return [span.view(one.dtype).view(one.shape) for span, one in zip(spans, self._tensors, strict=True)]

    def copy_to(self, buffer: Tensor) -> None:
        """Copies the masters to the first bytes of a buffer on a device."""
        buffer[: self.nbytes].copy_(self._host, non_blocking=True)

    def point_to(self, buffer: Tensor) -> None:
        """Points the model's tensors to the copy in a buffer."""
        for tensor, view in zip(self._tensors, self.views(buffer), strict=True):
            tensor.data = view

    def restore(self) -> None:
        """Points the model's tensors to the masters again; nothing is copied."""
        for tensor, master in zip(self._tensors, self._masters, strict=True):
            tensor.data = master


class Prefetcher:
    """Copies blocks to buffers on a device, on a separate stream where the device has streams, and counts the bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held_bytes = self.peak_bytes = self.moved_bytes = 0  # of buffers now and at most; of copies in all
        self._stream = torch.Stream(device) if has_streams(device) else None

    def keep(self, nbytes: int) -> Tensor:
        """A permanent buffer of `nbytes` bytes."""
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def borrow(self, sizes: list[int]) -> Iterator[list[Tensor]]:
        """Buffers of these byte sizes while the context lasts; all copies are complete when it ends."""
        try:
            yield [self.keep(nbytes) for nbytes in sizes]
        finally:
            if self._stream is not None:  # before buffers are freed, or masters changed
                self._stream.synchronize()
            self.held_bytes -= sum(sizes)

    def fetch(self, block: HostBlock, buffer: Tensor) -> torch.Event | None:
        """Starts the copy of a block after all work queued on the buffer; returns the event for [`wait`]."""
        self.moved_bytes += block.nbytes
        if self._stream is None:
            block.copy_to(buffer)
            return None
        # Queued work may still use the buffer's previous contents.
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            block.copy_to(buffer)
        return self._stream.record_event()

    def wait(self, copy: torch.Event | None) -> None:
        """Makes work queued from now on wait for a copy and those before it."""
        if copy is not None:
            torch.accelerator.current_stream(self.device).wait_event(copy)


def _host_memory(owner: object, nbytes: int, device: torch.device) -> Tensor:
    """Host memory for copies to a device, pinned while `owner` lives where copies can overlap with computation."""
    if device.type != "cuda" or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_streams(device))
    # torch's own pinned allocator rounds up to a power of two: here exactly these bytes are pinned.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # a fork would copy pinned pages for each data-loader worker
    memory, runtime = torch.frombuffer(pages, dtype=torch.uint8), torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 1))  # for all devices
    finalize(owner, lambda: runtime.cudaHostUnregister(memory.data_ptr())).atexit = False
    return memory


class Offloaded(Placement):
    """Keeps at most a copy of the head on the device between uses; a subclass says how many layers while it scores.

    Of one among several teachers not even that: the loss copies the head from host memory where it needs it.
    """

    def __init__(self, model: CausalLM, device: torch.device, keeps_head: bool = True) -> None:
        self.model, self.device, self.prefetcher = model, device, Prefetcher(device)
        parts = parts_of(model)  # their data moves to host memory, pinned where that helps
        self._layers = [layer for layer, _ in parts.layers]
        self._blocks = [HostBlock(own, device) for _, own in parts.layers]
        self._rest = HostBlock(parts.rest, device)
        self._head, self._head_there = HostBlock(parts.head, device), None
        if keeps_head:  # the loss needs it after the teacher is offloaded
            self._head_there = self.prefetcher.keep(self._head.nbytes)
            self._copy(self._head, self._head_there)

    @property
    def head(self) -> OutputHead:
        if self._head_there is None:
            return OutputHead.of(self.model)
        weight, *bias = self._head.views(self._head_there)
        return replace(OutputHead.of(self.model), weight=weight, bias=bias[0] if bias else None)

    def _copy(self, block: HostBlock, buffer: Tensor) -> None:
        self.prefetcher.wait(self.prefetcher.fetch(block, buffer))

    @abstractmethod
    def buffer_sizes(self, layers: list[int]) -> list[int]:
        """Bytes of the buffers for layers of these sizes: one per layer, or two for all in turn."""

    @contextmanager
    def loaded(self, passes: int) -> Iterator[Run]:
        kept = self._head_there
        sizes = [self._rest.nbytes, self._head.nbytes if kept is None else 0]
        sizes += self.buffer_sizes([block.nbytes for block in self._blocks])
        hooks: list[Any] = []
        with self.prefetcher.borrow(sizes) as (rest, head, *buffers):
            try:
                # The head is refreshed for each scoring, so that it fits the hidden states even if the masters changed
                # in between. What belongs to no layer is needed from the first operation on.
                for block, buffer in ((self._head, head if kept is None else kept), (self._rest, rest)):
                    self._copy(block, buffer)
                    block.point_to(buffer)
                prefetch = _LayerPrefetch(self._blocks, buffers, self.prefetcher, visits=passes * len(self._blocks))
                hooks += [
                    layer.register_forward_pre_hook(lambda *_, number=number: prefetch.enter(number))
                    for number, layer in enumerate(self._layers)
                ]
                yield partial(call, self.model)
            finally:
                for hook in hooks:
                    hook.remove()
                for block in (*self._blocks, self._rest, self._head):
                    block.restore()


class Hosted(Offloaded):
    """`teacher_offload="cpu"`: the whole model is on the device while it scores."""

    @property
    def where(self) -> str:
        return f"in host memory, copied to {self.device} for scoring"

    def buffer_sizes(self, layers: list[int]) -> list[int]:
        return layers


class _LayerPrefetch:
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


class Streamed(Offloaded):
    """`teacher_offload="stream"`: on the device are at most two layers, the head, and what belongs to no layer."""

    is_whole = False
    passes_are_costly = True

    def __init__(self, model: CausalLM, device: torch.device, keeps_head: bool = True) -> None:
        if not layer_list(model):
            raise ValueError(
                f"`teacher_offload='stream'`: {type(model).__name__} does not keep its layers in a "
                "`torch.nn.ModuleList`, so they cannot be streamed: set `teacher_offload='cpu'`."
            )
        super().__init__(model, device, keeps_head)

    @property
    def where(self) -> str:
        return f"in host memory, copied to {self.device} layer by layer"

    def buffer_sizes(self, layers: list[int]) -> list[int]:
        # Two buffers in turn: one layer computes from one while the next is copied to the other.
        return [max(layers)] * min(2, len(layers))


class Sharded(Placement):
    """`teacher_offload="zero3"`: each process keeps its shard in host memory. The loss gathers the head."""

    is_whole = False
    passes_are_costly = True

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model, self.device = model, device
        width, layer = model.config.get_text_config().hidden_size, max(map(numbers_in, layer_list(model)), default=0)
        self._read = SplitReader(model, reader_config(model.dtype, width, device, layer))

    @property
    def where(self) -> str:
        return "sharded over the processes, in host memory"

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.model)

    @contextmanager
    def loaded(self, passes: int) -> Iterator[Run]:
        yield self._read

    def passes_to_run(self, passes: int) -> int:
        # Each pass gathers from all processes, so all must run the same number.
        return max_over_processes(passes, self.device)
