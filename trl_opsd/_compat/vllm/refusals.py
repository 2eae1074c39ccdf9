"""Shortens vLLM's errors, which may fill a page, to one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REASON = 400
"""Maximum length of vLLM's own text in an error, in characters; it may list hundreds of architectures."""


@contextmanager
def starting(model: str) -> Iterator[None]:
    """Re-raises errors at an engine's start as a `ValueError` about the checkpoint, except out-of-memory errors."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise refused(f"does not start an engine for the student's checkpoint {model!r}", error) from error


def refused(what: str, error: Exception) -> ValueError:
    """An error that says what vLLM does not do, with the beginning of vLLM's own message."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON]
    return ValueError(f"vLLM {what}, {reason}. Where it does not know the architecture, set `use_vllm=False`.")
