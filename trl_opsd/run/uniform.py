"""Rejects a teacher whose distribution is uniform, from the sums of a loss; knows numbers, and no models."""

from __future__ import annotations

import math
from collections.abc import Mapping

_NEAR_UNIFORM = 1e-4
"""Nats: a teacher whose mean entropy is within this of ln V is taken as uniform; no trained one comes near."""
_ROUNDING = 1e-5
"""Rounding error of float32 sums, in nats."""


def check_not_uniform(sums: Mapping[str, float], vocabulary: int, temperature: float) -> None:
    """Refuses a loss from which the student would learn nothing, because the teacher is uniform.

    Args:
        sums (`Mapping[str, float]`):
            Sums over all processes, by the names in [`LossParts.ROW_NAMES`]; finite.
        vocabulary (`int`):
            Number of token ids the two models share.
        temperature (`float`):
            Softmax temperature of the loss. It flattens a distribution by its square: beyond about 3 the sums cannot
            tell a flattened teacher from a uniform one, and only the check of the logits at construction applies.

    Raises:
        ValueError: The teacher gives every token the same probability.
    """
    weight, margin = sums["weight"], _NEAR_UNIFORM / max(1.0, temperature) ** 2
    if not weight or vocabulary == 1 or margin < _ROUNDING:
        return
    if sums["teacher_entropy"] / weight > math.log(vocabulary) - margin:
        raise ValueError(
            f"The teacher gives all {vocabulary} tokens the same probability (entropy ln {vocabulary} = "
            f"{math.log(vocabulary):.4f} nats): its head is zeroed or was not loaded; the student's weights are as "
            "they were before this step. Load it again."
        )
