"""Names what the host waits for between the student's forward pass and its backward pass, on any device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_opsd import OPSDTrainer

WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::repeat_interleave",
)
"""Operations whose results, or their shapes, the host needs; and indexing by booleans, which counts them."""
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def of_each_micro_batch(trainer: OPSDTrainer) -> list[list[str]]:
    """Trains, and returns the waits of each micro-batch: on a GPU what torch warns of, else what would wait there."""
    watch = watch_on(trainer.accelerator.device)
    each, backward = [], trainer.accelerator.backward

    def backward_and_stop(*args, **kwargs):
        backward(*args, **kwargs)
        each.append(watch.stop())

    def start(*_):
        if trainer.model.training:
            watch.start()

    hook = trainer.model.get_decoder().register_forward_hook(start)
    try:
        with watch.active(), patch.object(trainer.accelerator, "backward", backward_and_stop):
            trainer.train()
    finally:
        hook.remove()
    return each


def watch_on(device: torch.device) -> WarnedOf | Waits:
    return WarnedOf() if device.type == "cuda" else Waits()


class WarnedOf:
    """The waits that CUDA's operations warn of, while it is on."""

    def __init__(self):
        self._caught = []

    @contextmanager
    def active(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as self._caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def start(self) -> None:
        self._caught.clear()
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> list[str]:
        torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in self._caught if "called a synchronizing" in str(one.message)]
        return [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in waits]


class Waits(TorchDispatchMode):
    """Names the operations that would wait for a device, while it is on."""

    def __init__(self):
        super().__init__()
        self.found, self.on = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if self.on:
            by_booleans = name in INDEXING and any(
                one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            )
            if name in WAITS or by_booleans:
                self.found.append(name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def active(self) -> Iterator[None]:
        to_list = torch.Tensor.tolist

        def listed(tensor):
            if self.on:
                self.found.append("tolist")
            was_on, self.on = self.on, False
            try:
                return to_list(tensor)
            finally:
                self.on = was_on

        with self, patch.object(torch.Tensor, "tolist", listed):
            yield

    def start(self) -> None:
        self.on = True

    def stop(self) -> list[str]:
        self.on, found, self.found = False, self.found, []
        return found
