"""Preserves the global random state across a block of code, and derives seeds that do not depend on it."""

from __future__ import annotations

import hashlib
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


def derived_seed(*numbers: int) -> int:
    """A seed from 0 to 2**63 - 1 for these numbers, the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big") >> 1
