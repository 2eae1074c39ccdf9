"""The trainer as a rollout sees it; any object with these members will do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerState

from trl_opsd.config import OPSDConfig
from trl_opsd.data.readers import PromptLimits
from trl_opsd.models.padding import BatchPolicy
from trl_opsd.types.rollout import PromptIds


class Host(Protocol):
    """The trainer, as a [`RolloutBackend`] sees it."""

    args: OPSDConfig
    """The options."""
    model: PreTrainedModel
    """The student, or the `PeftModel` around it, without its distributed wrapper."""
    accelerator: Accelerator
    """Processes and devices of the launch."""
    state: TrainerState
    """State of the training; `global_step` counts optimizer steps."""
    processing_class: PreTrainedTokenizerBase
    """The student's tokenizer."""
    generation_config: GenerationConfig
    """Sampling options as `generate` takes them."""
    eos_token_ids: list[int]
    """End tokens; a completion ends at the first of them."""
    placeholders: list[int]
    """Placeholder tokens of images and other media, which are never sampled."""
    batching: BatchPolicy
    """Which rows the student can read in one batch."""
    loads: int
    """Number of times a checkpoint was loaded into the student."""
    reads_images: bool | None
    """Whether prompts have images; `None` if that is not known yet."""
    processors: Mapping[str, ProcessorMixin | None]
    """What reads images; the student's processor under an empty name."""

    @property
    def reads_logprobs(self) -> bool:
        """Whether [`RolloutBackend.logprobs`] of the current generation are read, of one row in 16 or of all."""

    @property
    def learns_from_draws(self) -> bool:
        """Whether the loss is a policy gradient, which depends on the distribution that tokens were sampled from."""

    @property
    def limits(self) -> PromptLimits:
        """Limits of prompts and completions."""

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        """Left-padded `input_ids` and `attention_mask`, [B, P], on the device."""

    def probe_prompts(self, processor: str = "") -> list[PromptIds]:
        """Prompts with images to examine the model with that this processor belongs to; the first has one."""

    def student_for_generation(self) -> AbstractContextManager[Any]:
        """The bare student in eval mode, gathered where it is sharded and the options allow it. Collective."""

    def in_student(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(student, *args)`, within the forward of its wrapper where the student is sharded. Collective."""

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Gathers parameters that ZeRO-3 has sharded, read-only. Collective."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to `time/<name>` in the log."""

    def record(self, name: str, value: float, count: float = 1) -> None:
        """Adds a value to the next log, which has the mean of all processes; in an evaluation weighted by `count`."""
