"""Threads on the device of who starts them: of itself, a thread is on the first of its machine in every process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import torch


def device_setter() -> Callable[[], None]:
    """Makes this thread's current device that of the thread which calls the result."""
    if not torch.accelerator.is_available():
        return lambda: None
    return partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


def start_thread(name: str, target: Callable[..., object], *args: Any) -> None:
    """Starts a daemon: a call that never returns must not keep the program alive."""
    set_device = device_setter()

    def run() -> None:
        set_device()
        target(*args)

    Thread(target=run, name=name, daemon=True).start()
