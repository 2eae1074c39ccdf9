"""Rows with pictures: losses on the device and on the CPU, and the host's seconds for pictures of a megapixel."""

from __future__ import annotations

import os
import tempfile
import time
from unittest.mock import patch

import torch
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
    words = vision_language.processor("qwen2_5_vl", unit=14)
    side = 1008 if found.full else 112
    several = [vision_language.picture(number, side, side) for number in range(4)]
    start = time.perf_counter()
    pixels = words.image_processor(several, return_tensors="pt")["pixel_values"]
    found.note("a picture of 1 MP: the processor's time", 1e3 * (time.perf_counter() - start) / len(several), "ms")
    if found.on_gpu:
        start = time.perf_counter()
        pixels.to(torch.device(found.device))
        torch.accelerator.synchronize()
        found.note("its copy to the device", 1e3 * (time.perf_counter() - start) / len(several), "ms")


def _losses(use_cpu: bool) -> list[float]:
    # accelerate takes the device of its environment even with `use_cpu`
    of_cpu = {"ACCELERATE_TORCH_DEVICE": "cpu"} if use_cpu else {}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, of_cpu):
        given = vision_language.arguments("qwen2_5_vl")
        trainer = OPSDTrainer(
            **given,
            args=tiny.config(folder, use_cpu=use_cpu, gradient_accumulation_steps=2),
            train_dataset=vision_language.rows(NUMBERS),
            rollout=Answering({}),
        )
        trainer.train()
    return tiny.logged(trainer, "loss")
