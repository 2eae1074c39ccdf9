"""Lets the student write with `generate` of `transformers`: one padded batch, sampled as TRL samples it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import StoppingCriteria, StoppingCriteriaList

from trl_opsd.rollout.base import RolloutBackend


class HFRollout(RolloutBackend):
    """Generates with `transformers`: one padded batch of prompts, sampled with the trainer's generation options."""

    def bind(self, trainer: Any) -> None:
        self._trainer = trainer

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        trainer = self._trainer
        inputs = trainer.pad_prompts(prompt_ids)
        # In a later turn with tools the prompt may already fill most of the context.
        new_tokens = trainer.limits.room(max(map(len, prompt_ids)))
        config = copy.copy(trainer.generation_config)
        config.max_new_tokens = new_tokens
        with (
            trainer.student_for_generation() as student,
            _TokenProgress(new_tokens, trainer.show_progress) as progress,
        ):
            written = student.generate(
                **inputs, generation_config=config, stopping_criteria=StoppingCriteriaList([progress])
            )
        completions: list[list[int]] = written[:, inputs["input_ids"].size(1) :].tolist()
        return completions


class _TokenProgress(StoppingCriteria):
    """A progress bar over decode steps that shows itself only when decoding takes long; it never stops anything."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar = tqdm(total=total, desc="complete", unit="token", delay=5, leave=False, disable=not show)

    def __enter__(self) -> _TokenProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self._bar.update()
        return torch.zeros(input_ids.size(0), dtype=torch.bool, device=input_ids.device)
