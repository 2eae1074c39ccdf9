"""Rows with pictures: losses on the device and on the CPU."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest.mock import patch

from support import tiny, vision_language

from gpu_checks.findings import Findings
from trl_opsd import FixedRollout, OPSDTrainer

NUMBERS = (1, 0, 1, 2)
"""Pictures of each row."""


class Answering(FixedRollout):
    """Completions that follow from the prompts."""

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        return [vision_language.answer(ids) for ids in prompt_ids]


def pictures(found: Findings) -> None:
    here, cpu = (_losses(use_cpu) for use_cpu in (not found.on_gpu, True))
    found.equal("steps taken", len(here), 3)
    gap = max(abs(a - b) / abs(b) for a, b in zip(here, cpu, strict=True))
    found.at_most("difference of the losses, relative to the CPU's", gap, 1e-3)
    found.at_least("the loss moves by", max(here) - min(here), 1e-5, "nats")


def _losses(use_cpu: bool) -> list[float]:
    given = {**vision_language.arguments("qwen2_5_vl"), "train_dataset": vision_language.rows(NUMBERS)}
    trainer = trained(use_cpu, {"gradient_accumulation_steps": 2}, **given, rollout=Answering({}))
    return tiny.logged(trainer, "loss")


def trained(use_cpu: bool, options: dict[str, Any], **given: Any) -> OPSDTrainer:
    """A trainer that has trained, on the device or on the CPU."""
    # accelerate takes the device of its environment even with `use_cpu`
    of_cpu = {"ACCELERATE_TORCH_DEVICE": "cpu"} if use_cpu else {}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, of_cpu):
        trainer = OPSDTrainer(**given, args=tiny.config(folder, use_cpu=use_cpu, **options))
        trainer.train()
    return trainer
