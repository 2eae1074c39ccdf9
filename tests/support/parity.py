"""TRL's trainer on recorded completions, and how far another trainer is from it."""

from __future__ import annotations

import torch
from support import tiny
from trl import DistillationTrainer

from trl_opsd import FixedRollout

TOLERANCE = 1e-5


class Replaying(DistillationTrainer):
    """TRL's trainer with recorded completions instead of generated ones."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, has_tool_images=False):
        return FixedRollout(tiny.recorded(self.processing_class)).complete(prompt_ids, 0)


def losses(trainer: DistillationTrainer) -> torch.Tensor:
    return torch.tensor(tiny.logged(trainer, "loss"))


def largest_gaps(one: DistillationTrainer, other: DistillationTrainer) -> tuple[float, float]:
    """The largest difference of a logged loss, and of a parameter."""
    assert len(losses(one)) == 3
    return (
        (losses(one) - losses(other)).abs().max().item(),
        (tiny.weights(one) - tiny.weights(other)).abs().max().item(),
    )
