"""Sets the environment variables of a launcher, for a library that reads the process's rank only from there."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed


@contextmanager
def launcher_environment() -> Iterator[None]:
    """Sets `RANK`, `WORLD_SIZE` and so on while the context is open; vLLM reads them while an engine is built."""
    # The process group knows the rank also where no launcher has set variables.
    group = distributed.is_initialized()
    rank = distributed.get_rank() if group else 0
    given = {
        "RANK": str(rank),
        "LOCAL_RANK": _device(),
        "WORLD_SIZE": str(distributed.get_world_size() if group else 1),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(_free_port()),
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        # If they stayed, the next accelerator in this process would look for other processes.
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _device() -> str:
    """The index of this process's device, which is not its local rank where each process sees a single device."""
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_device_index())
    return os.environ.get("LOCAL_RANK", "0")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
