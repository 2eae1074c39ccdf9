"""In which dtype a launch multiplies, and which dtypes cannot be multiplied or trained; it knows no trainer.

What rounds is mostly somebody else: accelerate gives a model autocast in its `forward`, FSDP2 and DeepSpeed cast its
weights. The loss does not go through `forward`, and a model beside the student is cast by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def autocast(accelerator: Any) -> Iterator[None]:
    """Whatever is multiplied inside is rounded to what `bf16=True` or `fp16=True` says, on every launch.

    accelerate's own context does the same, but nothing under DeepSpeed, which casts the student's weights and leaves
    a teacher, and the head of one, in float32.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Of the launch.
    """
    dtype = _HALF.get(accelerator.mixed_precision)
    if dtype is None or accelerator.native_amp:
        with accelerator.autocast():
            yield
    else:
        with torch.autocast(accelerator.device.type, dtype=dtype):
            yield


def carried(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function that multiplies as it would here, wherever it is called: DeepSpeed ends autocast in its forward."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def run(*args: Any) -> Any:
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return function(*args)

    return run
