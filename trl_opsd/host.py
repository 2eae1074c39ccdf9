"""What a rollout may ask of the trainer it writes for: all of it, so that anything with these members can have one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from trl_opsd.config import OPSDConfig
from trl_opsd.data.prompts import PromptLimits
from trl_opsd.models.padding import Reading


class Host(Protocol):
    """The trainer, as a [`RolloutBackend`] sees it."""

    args: OPSDConfig
    """The options."""
    model: PreTrainedModel
    """The student, or the `PeftModel` around it; without its distributed wrapper."""
    accelerator: Accelerator
    """Processes and devices of the launch."""
    state: TrainerState
    """Of the training; `global_step` counts optimizer steps."""
    processing_class: PreTrainedTokenizerBase
    """The student's tokenizer."""
    generation_config: GenerationConfig
    """Sampling options in the words of `generate`."""
    eos_token_ids: list[int]
    """A completion ends with the first of these."""
    placeholders: list[int]
    """Tokens that stand for an image or the like, which are never written."""
    reading: Reading
    """Which rows the student reads in one batch."""
    loads: int
    """How often a checkpoint was read into the student."""
    show_progress: bool
    """Whether this process may draw progress bars."""

    @property
    def limits(self) -> PromptLimits:
        """What prompts and completions keep to."""

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        """Left-padded `input_ids` and `attention_mask`, [B, P], on the device."""

    def student_for_generation(self) -> AbstractContextManager[Any]:
        """The bare student in eval mode, gathered where it is sharded and the options allow it. Collective."""

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Makes parameters that ZeRO-3 has split whole, to be read. Collective."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Bills what runs inside to `time/<name>` in the log."""

    def record(self, name: str, value: float) -> None:
        """Adds a number of this process to the next log, which shows the mean."""
