"""TRL's trainer on recorded completions, and how far another trainer is from it."""

from __future__ import annotations

from typing import Any

import torch
from support import tiny
from trl import DistillationTrainer

from trl_opsd import FixedRollout, OPSDTrainer

TOLERANCE = 1e-5


class Replaying(DistillationTrainer):
    """TRL's trainer with recorded completions instead of generated ones."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, has_tool_images=False):
        words = getattr(self.processing_class, "tokenizer", self.processing_class)
        return FixedRollout(tiny.recorded(words)).complete(prompt_ids, 0)


def made(cls: type, config: Any, **given: Any) -> Any:
    """A tiny student's trainer, TRL's or ours, which replays what was recorded."""
    words = tiny.tokenizer()
    recorded = {"rollout": FixedRollout(tiny.recorded(words))} if issubclass(cls, OPSDTrainer) else {}
    arguments = {"train_dataset": tiny.rows(), "processing_class": words, **recorded, **given}
    if "model" not in given:
        arguments |= {"model": tiny.qwen2(32, seed=0), "teacher_model": tiny.qwen2(48, seed=1)}
    return cls(args=config, **arguments)


def trained(cls: type, config: Any, **given: Any) -> Any:
    trainer = made(cls, config, **given)
    trainer.train()
    return trainer


def losses(trainer: DistillationTrainer) -> torch.Tensor:
    return torch.tensor(tiny.logged(trainer, "loss"))


def largest_gaps(one: DistillationTrainer, other: DistillationTrainer) -> tuple[float, float]:
    """The largest difference of a logged loss, and of a parameter."""
    assert len(losses(one)) == 3
    return (
        (losses(one) - losses(other)).abs().max().item(),
        (tiny.weights(one) - tiny.weights(other)).abs().max().item(),
    )
