"""Runs a model for the first time, to see whether what is assumed of it holds; every error says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.run.precision import dtypes_of
from trl_opsd.types import OutputHead

CANNOT_RUN = (AttributeError, TypeError, LookupError, AssertionError, NotImplementedError, RuntimeError)
"""What models raise whose forward takes something else."""


@contextmanager
def readable(model: CausalLM, role: str) -> Iterator[None]:
    """Says in our words that a model cannot be run at all, which is noticed where it is run first."""
    try:
        yield
    except CANNOT_RUN as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"The {role} ({type(model).__name__}) cannot read eight tokens, {type(error).__name__}: {error}. Its "
            "forward has to take `input_ids` and `attention_mask` alone, also with the adapter it was given: take "
            "another model, or give `target_modules` by name."
        ) from error


def most_exactly(model: CausalLM, role: str, read: Callable[[], Any]) -> Any:
    """`read()`, in autocast only where a mixture of dtypes needs it: it rounds what is to be compared."""
    device = OutputHead.of(model).weight.device.type
    try:
        with torch.autocast(device, enabled=False):
            return read()
    except RuntimeError as error:
        if not ("dtype" in str(error) or "scalar type" in str(error)):
            raise
        if not torch.is_autocast_enabled(device):
            raise ValueError(
                f"The {role} ({type(model).__name__}) has weights of dtypes that cannot be multiplied with each other: "
                f"{dtypes_of(model)}. Load it in one, for instance with `dtype='bfloat16'`, or cast it, `model.to("
                f"torch.bfloat16)`; or set `bf16=True`, which rounds factors where they meet. Said torch: {error}"
            ) from error
    return read()
