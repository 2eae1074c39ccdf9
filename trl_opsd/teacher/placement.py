"""Where a teacher's weights are while it does not read; a placement knows nothing of rollouts or losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run
from trl_opsd.types import OutputHead


class Placement(ABC):
    """Keeps one frozen model. Wherever that is, the same rows give the same hidden states.

    While the model does not read, its own parameters are the only masters of its weights: whoever changes them in place
    then has changed the teacher. What visits the device is a copy, and is never copied back.
    """

    model: CausalLM
    """The causal language model, bare or wrapped by `peft`."""
    device: torch.device
    """Where a rollout has to be to be read."""

    @property
    @abstractmethod
    def head(self) -> OutputHead:
        """The head, where the loss can use it at any time; as of the last reading."""

    @abstractmethod
    def reading(self, passes: int) -> AbstractContextManager[Run]:
        """Brings the model to the device for as long as the context lasts.

        Args:
            passes (`int`):
                Forward passes that will be made; nothing is fetched for one more.

        Returns:
            `ContextManager`: gives a [`~models.backbone.Run`], through which every pass has to go.
        """

    @abstractmethod
    def agreed(self, passes: int) -> int:
        """How many passes to make where this process needs `passes`: more, if others need more and all must join in."""
