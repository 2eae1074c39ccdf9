"""Has a teacher write completions, with transformers' `generate` and the student's sampling options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from trl_opsd._compat.peft import CausalLM
from trl_opsd.data.prompts import PromptLimits
from trl_opsd.host import Host
from trl_opsd.models.mode import preserved_mode
from trl_opsd.models.padding import Reading
from trl_opsd.rollout.hf import HFRollout
from trl_opsd.rollout.returned import checked_completions
from trl_opsd.run.precision import autocast


class Lender(Protocol):
    """What a teacher that is a model has besides its targets."""

    model: CausalLM
    """Its model; that of the student, if it is the student."""
    is_whole: bool
    """Whether a process can call the model by itself."""

    @property
    def reading(self) -> Reading:
        """Which rows it reads together."""

    def lent(self) -> AbstractContextManager[CausalLM]:
        """The model, where it can be called."""


class OfTeacher:
    """Writes with one teacher, in each process by itself.

    Args:
        host ([`~host.Host`]):
            The trainer, whose sampling options, tokenizer and end tokens are used.
        teacher ([`Lender`]):
            The teacher.
        limits ([`~data.prompts.PromptLimits`]):
            Of its prompts, with its name.

    Raises:
        ValueError: Its model is not whole where it reads, or it is no model.
    """

    def __init__(self, host: Host, teacher: Lender, limits: PromptLimits) -> None:
        splits = _is_split_student(host, teacher)
        if splits or not getattr(teacher, "is_whole", False):
            raise ValueError(
                f"`seq_kd=True`: {limits.reader}, a {type(teacher).__name__}, cannot write completions, which takes a "
                "whole model in each process: use `teacher_offload='none'` or 'cpu' without a server, or write them "
                "before, into a column 'completion'."
            )
        self.teacher = teacher
        self._host = cast(Host, _AsStudent(host, teacher, limits))
        self._rollout = _Apart()
        self._rollout.bind(self._host)
        self._rollout.prove()  # now, as under DeepSpeed all processes have to

    def complete(self, prompt_ids: Sequence[list[int]]) -> list[list[int]]:
        """A completion for each of at least one of its prompts, cut after the first end token."""
        prompts = [list(ids) for ids in prompt_ids]
        written = self._rollout.complete(prompts, self._host.state.global_step)
        return checked_completions(written, self._host, prompts, self._host.limits.reader)


def _is_split_student(host: Host, teacher: Lender) -> bool:
    """Whether it is the student, and that is split over processes, now or once it is prepared for training."""
    plugin = getattr(host.accelerator.state, "deepspeed_plugin", None)
    is_split = host.accelerator.distributed_type == DistributedType.FSDP or (plugin and plugin.zero_stage == 3)
    return bool(is_split) and getattr(teacher, "model", None) is host.model


class _Apart(HFRollout):
    is_apart = True


class _AsStudent:
    """The trainer, with a teacher in place of its student."""

    reads_logprobs = False

    def __init__(self, host: Host, teacher: Lender, limits: PromptLimits) -> None:
        self._host, self._teacher, self.limits = host, teacher, limits
        self.model = teacher.model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    @property
    def reading(self) -> Reading:
        return replace(self._teacher.reading, packed=False, multiple_of=1)

    def pad_prompts(self, prompt_ids: list[list[int]]) -> dict[str, Tensor]:
        device = next(one.device for one in self.model.parameters() if not one.is_meta)
        return {name: tensor.to(device) for name, tensor in self._host.pad_prompts(prompt_ids).items()}

    @contextmanager
    def student_for_generation(self) -> Iterator[CausalLM]:
        is_student = self._teacher.model is self._host.model
        with (
            self._host.student_for_generation() if is_student else preserved_mode(self.model),
            torch.no_grad(),
            autocast(self._host.accelerator),
            self._teacher.lent() as model,
        ):
            yield model.eval()
