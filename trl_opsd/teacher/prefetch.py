"""Prefetching: weights in blocks of host memory, copied to buffers on a device ahead of their use."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import finalize

import torch
from torch import Tensor

from trl_opsd.types.kept import has_streams

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
            self._finish()
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

    def _finish(self) -> None:
        """Blocks until all copies are complete, so that buffers can be freed and masters changed."""
        if self._stream is not None:
            self._stream.synchronize()


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
