"""Undoes what vLLM changes for the whole process: classes, settings of torch and Python, and the environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from accelerate.utils import patch_environment
from accelerate.utils.other import get_free_port
from torch import distributed, nn


@contextmanager
def preserved_process() -> Iterator[None]:
    """Restores torch's current stream, threads and matmul precision, and unfreezes garbage collection, on exit."""
    # vLLM's worker on a GPU sets the precision, that on a CPU replaces `torch.set_num_threads` by a no-op, and the
    # engine takes all objects out of garbage collection, the trainer's too. Its shared experts and some routers leave a
    # stream of vLLM's as the current one, which DeepSpeed, waiting for the default stream, ignores.
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    backends: Any = torch.backends
    products = [(one, one.fp32_precision) for one in (backends.cuda.matmul, backends.mkldnn.matmul)]
    precision, frozen = None, gc.get_freeze_count()
    with suppress(RuntimeError):  # set by backend, as `tf32=True` does, it has no single name
        precision = torch.get_float32_matmul_precision()
    device: Any = torch.get_device_module() if torch.accelerator.is_available() else None
    stream = device.current_stream() if hasattr(device, "current_stream") else None  # MPS has none
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            set_threads(threads)
        if precision:
            torch.set_float32_matmul_precision(precision)
        for backend, value in products:
            backend.fp32_precision = value
        if not frozen:
            gc.unfreeze()
        if device and stream and (left := device.current_stream()) != stream:
            stream.wait_stream(left)
            device.set_stream(stream)  # vLLM's replacement, which records the current one


_ABSENT = object()


@contextmanager
def preserved_classes(root: type) -> Iterator[dict[type, type]]:
    """Restores a class and its loaded subclasses on exit; yields a dict of the changed ones, which is filled then."""
    before = {cls: (cls.__bases__, dict(vars(cls))) for cls in _family(root)}
    changed: dict[type, type] = {}
    try:
        yield changed
    finally:
        for cls, (bases, attributes) in before.items():
            added = tuple(base for base in cls.__bases__ if base not in bases)
            new = {name: value for name, value in vars(cls).items() if attributes.get(name, _ABSENT) is not value}
            if not added and not new:
                continue
            for name in new:
                if name in attributes:
                    setattr(cls, name, attributes[name])
                else:
                    delattr(cls, name)
            cls.__bases__ = bases
            # The changes live on in a subclass, for the engine's own modules.
            changed[cls] = type(cls)(cls.__name__, (cls, *added), {**new, "__module__": cls.__module__})


def retype(model: nn.Module, classes: Mapping[type, type]) -> None:
    """Switches modules to the subclasses from [`preserved_classes`], so that they keep the changes made for them."""
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))


def _family(root: type) -> Iterator[type]:
    yield root
    children: list[type] = root.__subclasses__()
    for child in children:
        yield from _family(child)


def launcher_environment() -> AbstractContextManager[None]:
    """Sets `RANK`, `WORLD_SIZE` and so on while the context is open; vLLM reads them while an engine is built."""
    # The process group knows the rank also where no launcher has set variables. If they stayed, the next accelerator
    # in this process would look for other processes.
    group = distributed.is_initialized()
    if torch.accelerator.is_available():  # not the local rank, where each process sees a single device
        device = torch.accelerator.current_device_index()
    else:
        device = int(os.environ.get("LOCAL_RANK", "0"))
    variables: AbstractContextManager[None] = patch_environment(
        RANK=distributed.get_rank() if group else 0,
        LOCAL_RANK=device,
        WORLD_SIZE=distributed.get_world_size() if group else 1,
        MASTER_ADDR=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        MASTER_PORT=os.environ.get("MASTER_PORT") or get_free_port(),
    )
    return variables
