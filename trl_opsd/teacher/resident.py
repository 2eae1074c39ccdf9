"""A teacher that stays whole on the device: the fastest, while there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from trl_opsd.backbone import Run, call
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead


class Resident(Placement):
    """`teacher_offload="none"`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher. One that was quantised or spread over devices stays where it was loaded.
        device (`torch.device`):
            Where it shall live.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        fixed = getattr(model, "hf_device_map", None) is not None or getattr(model, "is_quantized", False)
        self.model = model if fixed else model.to(device)
        self.device = next(model.parameters()).device

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.model)

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        yield partial(call, self.model)

    def agreed(self, passes: int) -> int:
        return passes
