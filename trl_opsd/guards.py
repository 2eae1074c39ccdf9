"""Looks at the sums of a loss before anybody steps along its gradient; it knows numbers, and no models."""

from __future__ import annotations

import math
from collections.abc import Mapping

_NEAR_UNIFORM = 1e-4
"""Nats below ln V that no teacher with an opinion comes near; float32 sums err by a tenth of it."""


def check_opinion(sums: Mapping[str, float], vocabulary: int) -> None:
    """Refuses a loss that would teach the student nothing.

    Args:
        sums (`Mapping[str, float]`):
            Over all processes, by the names in [`LossParts.ROW_NAMES`]; finite.
        vocabulary (`int`):
            Token ids the two models share.

    Raises:
        ValueError: The teacher gives every token the same probability.
    """
    tokens = sums["tokens"]
    if tokens and vocabulary > 1 and sums["teacher_entropy"] / tokens > math.log(vocabulary) - _NEAR_UNIFORM:
        raise ValueError(
            f"The teacher gives all {vocabulary} tokens the same probability (entropy ln {vocabulary} = "
            f"{math.log(vocabulary):.4f} nats): its head is zeroed or was not loaded; the student's weights are as "
            "they were before this step. Load it again."
        )
