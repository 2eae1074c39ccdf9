"""Keeps a model in training or evaluation mode across code that may change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserved_mode(model: nn.Module) -> Iterator[None]:
    """Restores the mode on exit, also after an exception: dropout and where TRL logs metrics depend on it."""
    was_training = model.training
    try:
        yield
    finally:
        if model.training != was_training:
            model.train(was_training)
