"""Where a frozen model's weights are kept: the interface, and the device itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import ClassVar

import torch
from torch import distributed

from trl_opsd._compat.peft import CausalLM
from trl_opsd.models.backbone import Run, call
from trl_opsd.models.checks import check_one_device
from trl_opsd.types import OutputHead


def max_over_processes(passes: int, device: torch.device) -> int:
    """The maximum over all processes. Collective."""
    if not distributed.is_initialized():
        return passes
    largest = torch.tensor(passes, device=device)
    distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
    return int(largest)


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
