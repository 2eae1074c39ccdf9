"""Where a teacher's weights are kept between scorings; a placement knows neither rollouts nor losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run
from trl_opsd.types import OutputHead


class Placement(ABC):
    """Holds one frozen model. In every placement, the same rows give the same hidden states.

    Between scorings the model's own parameters are the masters of its weights: changing them in place changes the
    teacher. What is on the device during a scoring is a copy, and is never copied back.
    """

    model: CausalLM
    """The causal language model, bare or wrapped by `peft`."""
    device: torch.device
    """The device that a rollout has to be on."""

    @property
    def where(self) -> str:
        """Where the weights are kept, in words."""
        return f"on {self.device}"

    @property
    @abstractmethod
    def head(self) -> OutputHead:
        """The head as of the last scoring, where the loss can use it at any time."""

    is_whole: ClassVar[bool] = True
    """Whether the model can be called directly within [`reading`], and not only through what that yields."""
    passes_cost: ClassVar[bool] = False
    """Whether each pass copies or gathers the weights again."""

    @abstractmethod
    def reading(self, passes: int) -> AbstractContextManager[Run]:
        """Brings the model to the device while the context lasts.

        Args:
            passes (`int`):
                Passes that follow; prefetching stops after the last.

        Returns:
            `ContextManager`: yields a [`~models.backbone.Run`], through which every pass has to go.
        """

    @abstractmethod
    def passes_to_run(self, passes: int) -> int:
        """Passes to run: `passes`, or the maximum over processes if passes are collective."""
