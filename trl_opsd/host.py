"""The trainer as others see it: a rollout, for which any object with these members will do, and the loop's objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from trl_opsd.config import OPSDConfig
from trl_opsd.data.prompts import PromptLimits, Row
from trl_opsd.data.readers import Readers, Request
from trl_opsd.models.padding import Reading
from trl_opsd.types import Rollout, TeacherTargets


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
    reading: Reading
    """Which rows the student can read in one batch."""
    loads: int
    """Number of times a checkpoint was loaded into the student."""
    show_progress: bool
    """Whether this process may draw progress bars."""

    @property
    def reads_logprobs(self) -> bool:
        """Whether the loss uses [`RolloutBackend.logprobs`] of the current generation."""

    @property
    def learns_from_draws(self) -> bool:
        """Whether the loss is a policy gradient, which depends on the distribution that tokens were sampled from."""

    @property
    def limits(self) -> PromptLimits:
        """Limits of prompts and completions."""

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        """Left-padded `input_ids` and `attention_mask`, [B, P], on the device."""

    def student_for_generation(self) -> AbstractContextManager[Any]:
        """The bare student in eval mode, gathered where it is sharded and the options allow it. Collective."""

    def gathered(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        """Gathers parameters that ZeRO-3 has sharded, read-only. Collective."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to `time/<name>` in the log."""

    def record(self, name: str, value: float) -> None:
        """Adds a value of this process to the next log, which reports the mean."""


class TrainerHost(Host, Protocol):
    """The trainer, as the objects of its loop see it: what a subclass may override is called here, never around it."""

    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    generation_kwargs: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    tools: Any
    divergence: Any
    temperature: float
    train_dataset: Any
    eval_dataset: Any
    dropped_prompts: Counter[str]
    base_samples: Any
    row_group: Any

    @property
    def readers(self) -> Readers: ...
    @property
    def reading_to_learn(self) -> Reading: ...
    @property
    def batch_name(self) -> str: ...
    @property
    def teacher_names(self) -> tuple[str, ...]: ...
    @property
    def temperatures(self) -> tuple[float, float]: ...
    @property
    def teaches_early(self) -> bool: ...

    def complete(self, prompt_ids: list[list[int]]) -> list[list[int]]: ...
    def teach(self, rollout: Rollout, rows: Sequence[Row]) -> TeacherTargets: ...
    def weigh(self, rollout: Rollout, rows: Sequence[Row], targets: TeacherTargets) -> Tensor: ...

    def read_rows(self, rows: Sequence[Row]) -> list[Request]: ...
    def rows_of(self, rollout: Rollout) -> Sequence[Row]: ...
    def expect(self, rollout: Rollout, rows: Sequence[Row]) -> None: ...
    def forget_expected(self) -> None: ...
    def tokenize(self, prompts: list[Any], **chat_template_kwargs: Any) -> list[list[int]]: ...
    def prompt_ids_of(self, rows: Sequence[Request]) -> list[list[int]]: ...
    def padded(self, prompt_ids: Sequence[list[int]], completions: Sequence[list[int]]) -> dict[str, Tensor]: ...
    def in_student(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def prove_student(self) -> None: ...
    def footprint(self, phase: str) -> dict[str, int]: ...
    def add_callback(self, callback: Any) -> None: ...
