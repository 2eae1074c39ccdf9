"""A teacher that stays whole on the device: the fastest, while there is room."""

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
            The teacher. One that was quantised or spread over devices stays where it was loaded.
        device (`torch.device`):
            Where it shall live.

    Raises:
        ValueError: Its output head, or a weight that nobody will bring, has no values in memory.
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

    def agreed(self, passes: int) -> int:
        return passes


def _check_in_memory(model: CausalLM) -> None:
    """accelerate brings what is on disk when a layer is called, and the loss does not call the head."""
    if OutputHead.of(model).weight.is_meta:
        where = "its output head is not in memory, and the loss reads it at every step"
    elif getattr(model, "hf_device_map", None) is None and any(one.is_meta for one in model.parameters()):
        where = "some of its weights were never loaded"
    else:
        return
    raise ValueError(
        f"The teacher ({type(model).__name__}) cannot teach from where it is: {where}. Leave the head on a device in "
        "its `device_map`, or load it whole, without one; `teacher_offload='stream'` then needs little of the device."
    )
