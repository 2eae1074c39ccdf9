"""Prefetching: weights in blocks of host memory, and buffers on a device that they are copied to ahead of use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from trl_opsd.run.kept import has_streams

_ALIGNMENT = 256
"""Bytes; the alignment of allocators, so that to a kernel a view is like a tensor with storage of its own."""


class HostBlock:
    """Tensors of a model in one piece of host memory, copied to the device by a single call.

    Separately they would take a call each; and, pinned, almost twice their size, because torch rounds each pinned
    allocation up to a power of two.

    Args:
        tensors (iterable of `torch.Tensor`):
            Parameters and buffers, each once. Their data moves here one after another, and the memory of each is freed
            as soon as it has moved.
        pinned (`bool`):
            Whether to pin the memory, so that copies to the device run asynchronously.
    """

    def __init__(self, tensors: Iterable[Tensor], pinned: bool) -> None:
        self._tensors = list(tensors)
        self._starts, self.nbytes = [], 0
        for tensor in self._tensors:
            self._starts.append(self.nbytes)
            self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self._masters = self.views(self._host)
        for tensor, master in zip(self._tensors, self._masters, strict=True):
            master.copy_(tensor.data)
            tensor.data = master

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of this block's tensors in the buffer it was copied to."""
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
    """Copies blocks to buffers on a device, and counts the bytes.

    Copies run on a stream of their own where the device has streams.

    Attributes:
        held_bytes (`int`): bytes of the buffers held now.
        peak_bytes (`int`): the maximum of `held_bytes` so far.
        moved_bytes (`int`): bytes copied from the host so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held_bytes = self.peak_bytes = self.moved_bytes = 0
        self._stream = torch.Stream(device) if has_streams(device) else None

    @property
    def wants_pinned(self) -> bool:
        """Whether copies can overlap with computation, for which host memory has to be pinned."""
        return self._stream is not None

    def keep(self, nbytes: int) -> Tensor:
        """A permanent buffer of `nbytes` bytes."""
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def borrow(self, sizes: list[int]) -> Iterator[list[Tensor]]:
        """Buffers of these sizes in bytes while the context lasts; all copies are complete when it ends."""
        try:
            yield [self.keep(nbytes) for nbytes in sizes]
        finally:
            self._finish()
            self.held_bytes -= sum(sizes)

    def fetch(self, block: HostBlock, buffer: Tensor) -> None:
        """Starts the copy of a block after all work queued on the buffer."""
        self.moved_bytes += block.nbytes
        if self._stream is None:
            block.copy_to(buffer)
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            block.copy_to(buffer)

    def wait_for_copies(self) -> None:
        """Makes work issued from now on wait for the copies started so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)

    def _finish(self) -> None:
        """Blocks until all copies are complete, so that buffers can be freed and masters changed."""
        if self._stream is not None:
            self.wait_for_copies()
            self._stream.synchronize()
