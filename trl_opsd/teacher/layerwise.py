"""A teacher in host memory whose layers are copied to the device one by one, each while the one before computes."""

from __future__ import annotations

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.teacher.hosted import Offloaded
from trl_opsd.teacher.parts import layer_list


class Streamed(Offloaded):
    """`teacher_offload="stream"`: on the device are at most two layers, the head, and what belongs to no layer."""

    is_whole = False
    passes_cost = True

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        if not layer_list(model):
            raise ValueError(
                f"`teacher_offload='stream'`: {type(model).__name__} does not keep its layers in a "
                "`torch.nn.ModuleList`, so they cannot be streamed one by one: set `teacher_offload='cpu'`."
            )
        super().__init__(model, device)

    @property
    def where(self) -> str:
        return f"in host memory, copied to {self.device} layer by layer"

    def buffer_sizes(self, layers: list[int]) -> list[int]:
        # Two buffers in turn: one layer computes from one while the next is copied to the other.
        return [max(layers)] * min(2, len(layers))
