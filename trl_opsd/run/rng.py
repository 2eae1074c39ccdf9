"""Preserves the global random state across a block of code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Restores the random state of Python, NumPy, torch and `device` on exit, also after an exception."""
    python, numpy = random.getstate(), np.random.get_state()
    fork = torch.random.fork_rng
    try:
        with fork([]) if device.type == "cpu" else fork([device], device_type=device.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
