"""A student to generate for without training it: the smallest [`Host`](rollout/host.py), for benchmarks and tests."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from support import tiny
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, TrainerState

from trl_opsd import OPSDConfig
from trl_opsd.data.readers import PromptLimits
from trl_opsd.models.padding import PADDED
from trl_opsd.types.rollout import PromptIds


class LoneHost:
    """One process with an unsharded student, which stays on its device, and no log; `options` are of the config."""

    def __init__(
        self,
        model: PreTrainedModel,
        limits: PromptLimits,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> None:
        on_cpu = model.device.type == "cpu"
        self.args = OPSDConfig(output_dir="nothing is written", use_cpu=on_cpu, report_to="none", **options)
        self.model, self.limits = model, limits
        self.accelerator = Accelerator(cpu=on_cpu)
        self.state = TrainerState()
        self.processing_class = tiny.tokenizer()
        self.generation_config = generation_config or GenerationConfig(max_new_tokens=limits.completion)
        self.eos_token_ids: list[int] = []
        self.placeholders: list[int] = []
        self.batching = PADDED
        self.loads = 0
        self.reads_images, self.processors = False, {}
        self.reads_logprobs = self.learns_from_draws = False

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        longest = max(map(len, prompt_ids))
        ids = [[0] * (longest - len(row)) + row for row in prompt_ids]
        real = [[0] * (longest - len(row)) + [1] * len(row) for row in prompt_ids]
        device = self.model.device
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(real, device=device)}

    def probe_prompts(self, processor: str = "") -> list[PromptIds]:
        raise NotImplementedError("it reads no images")

    def student_for_generation(self) -> AbstractContextManager[Any]:
        return nullcontext(self.model)

    def in_student(self, function: Any, *args: Any) -> Any:
        return function(self.model, *args)

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, name: str, value: float) -> None:
        """Does nothing: there is no log."""
