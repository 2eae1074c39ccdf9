"""A teacher that stays on the device: the fastest placement, if it fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, call
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead


class Resident(Placement):
    """`teacher_offload="none"`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher. One that is quantised or has a device map stays where it was loaded.
        device (`torch.device`):
            Where it is kept.

    Raises:
        ValueError: Its output head is not in memory, or weights were never loaded.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        _check_in_memory(model)
        fixed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
        self.model = model if fixed else model.to(device)
        self.device = next(one.device for one in model.parameters() if not one.is_meta)

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.model)

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        yield partial(call, self.model)

    def passes_to_run(self, passes: int) -> int:
        return passes


def _check_in_memory(model: CausalLM) -> None:
    """accelerate loads weights from disk when a layer is called, but the loss never calls the head."""
    if OutputHead.of(model).weight.is_meta:
        reason = "its output head is not in memory, and the loss reads it at every step"
    elif getattr(model, "hf_device_map", None) is None and any(one.is_meta for one in model.parameters()):
        reason = "some of its weights were never loaded"
    else:
        return
    raise ValueError(
        f"The teacher ({type(model).__name__}) cannot be used as it was loaded: {reason}. Keep the head on a device in "
        "its `device_map`, or load it without one; `teacher_offload='stream'` then takes little device memory."
    )
