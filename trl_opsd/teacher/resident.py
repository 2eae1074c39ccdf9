"""A teacher that stays on the device: the fastest placement, if it fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, call
from trl_opsd.models.model_checks import check_one_device
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead


class Resident(Placement):
    """`teacher_offload="none"`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The teacher. One that is quantised or has a device map was loaded there.
        device (`torch.device`):
            Where it is kept.

    Raises:
        ValueError: A part of it is elsewhere or not in memory.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        _check_in_memory(model, device)
        # Quantised weights and device maps cannot be moved with `to`.
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


def _check_in_memory(model: CausalLM, device: torch.device) -> None:
    """Refuses weights that are not where the loss, which never calls the head, can read them."""
    check_one_device(model, device, "teacher", "`teacher_offload='stream'` takes little device memory")
    if any(one.is_meta for one in model.parameters()):
        raise ValueError(
            f"The teacher ({type(model).__name__}) cannot be used as it was loaded: some of its weights are not in "
            "memory. Load it with `from_pretrained`; `teacher_offload='stream'` then takes little device memory."
        )
