"""Runs a model for the first time, and turns its errors into ones that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.run.precision import dtypes_of
from trl_opsd.types import OutputHead

CANNOT_RUN = (AttributeError, TypeError, LookupError, AssertionError, NotImplementedError, RuntimeError)
"""Errors raised by a forward that expects other inputs."""


@contextmanager
def explain_forward_errors(model: CausalLM, role: str) -> Iterator[None]:
    """Re-raises an error of a model's first forward pass as a `ValueError` that says what to do."""
    try:
        yield
    except CANNOT_RUN as error:
        # The trainer explains this one; it is not the model's fault.
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"The {role} ({type(model).__name__}) cannot read eight tokens, {type(error).__name__}: {error}. Its "
            "forward must accept `input_ids` and `attention_mask` alone, also with its adapter: use another model, or "
            "list `target_modules` by name."
        ) from error


def without_autocast_if_possible(model: CausalLM, role: str, read: Callable[[], Any]) -> Any:
    """`read()`, under autocast only where mixed dtypes require it, because autocast rounds the values to compare."""
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
                f"{dtypes_of(model)}. Load it in one dtype, for instance with `dtype='bfloat16'`, or cast it with "
                f"`model.to(torch.bfloat16)`; or set `bf16=True`, which casts the factors of each product. torch's "
                f"error: {error}"
            ) from error
    return read()
