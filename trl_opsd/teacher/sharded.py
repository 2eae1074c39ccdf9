"""A teacher sharded over the processes by DeepSpeed, in host memory, and gathered layer by layer while it scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trl_opsd._compat.deepspeed import SplitReader, reader_config
from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run
from trl_opsd.teacher.forward import max_over_processes
from trl_opsd.teacher.parts import layer_list, numbers_in
from trl_opsd.teacher.placement import Placement
from trl_opsd.types import OutputHead


class Sharded(Placement):
    """`teacher_offload="zero3"`: each process keeps its shard in host memory. The loss gathers the head."""

    is_whole = False
    passes_cost = True

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model, self.device = model, device
        width, layer = model.config.get_text_config().hidden_size, max(map(numbers_in, layer_list(model)), default=0)
        self._read = SplitReader(model, reader_config(model.dtype, width, device, layer))

    @property
    def where(self) -> str:
        return "sharded over the processes, in host memory"

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.model)

    @contextmanager
    def reading(self, passes: int) -> Iterator[Run]:
        yield self._read

    def passes_to_run(self, passes: int) -> int:
        # Each pass gathers from all processes, so all must run the same number.
        return max_over_processes(passes, self.device)
