"""Looks at the sums of a loss before anybody steps along its gradient; it knows numbers, and no models."""

from __future__ import annotations

import math
from collections.abc import Mapping

_NEAR_UNIFORM = 1e-4
"""Nats below ln V that no teacher with an opinion comes near."""
_ROUNDING = 1e-5
"""Nats by which float32 sums err."""


def check_opinion(sums: Mapping[str, float], vocabulary: int, temperature: float) -> None:
    """Refuses a loss that would teach the student nothing.

    Args:
        sums (`Mapping[str, float]`):
            Over all processes, by the names in [`LossParts.ROW_NAMES`]; finite.
        vocabulary (`int`):
            Token ids the two models share.
        temperature (`float`):
            That of the loss. Heat flattens every opinion, by its square: beyond about 3 the sums cannot tell it from
            none, and only the proof at construction has looked at the logits themselves.

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
