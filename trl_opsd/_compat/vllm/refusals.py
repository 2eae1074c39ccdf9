"""Says in a sentence what an engine refused, where its own error may fill a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_REASON = 400
"""Characters of vLLM's own words in an error; it may list hundreds of architectures."""


@contextmanager
def starting(model: str) -> Iterator[None]:
    """Refuses a student for whose checkpoint an engine does not start; that memory runs out is another matter."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise refused(f"does not start an engine for the student's checkpoint {model!r}", error) from error


def refused(what: str, error: Exception) -> ValueError:
    """The error that says what vLLM does not do, with the beginning of its own words."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON]
    return ValueError(f"vLLM {what}, {reason}. Where it does not know the architecture, set `use_vllm=False`.")
