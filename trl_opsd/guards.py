"""Looks at the sums of a loss before anybody steps along its gradient; it knows numbers, and no models."""

from __future__ import annotations

import math
from collections.abc import Mapping

_NEAR_UNIFORM = 1e-4
"""Nats below ln V that no teacher with an opinion comes near; float32 sums err by a tenth of it."""


def check_sums(sums: Mapping[str, float], vocabulary: int) -> None:
    """Refuses a loss that would ruin the student, or teach it nothing.

    Args:
        sums (`Mapping[str, float]`):
            Over all processes, by the names in [`LossParts.ROW_NAMES`].
        vocabulary (`int`):
            Token ids the two models share.

    Raises:
        FloatingPointError: A model's logits, or the divergence, are not finite; the message names the side.
        ValueError: The teacher gives every token the same probability.
    """
    unchanged = "the student's weights are as they were before this step"
    for side in ("teacher", "student"):
        if not math.isfinite(sums[f"{side}_entropy"]):
            raise FloatingPointError(
                f"The {side}'s logits are NaN or infinite: {unchanged}. "
                + (
                    "Load the teacher in another dtype (bfloat16 instead of float16), or repair its weights."
                    if side == "teacher"
                    else "Lower the learning rate, or go back to a checkpoint from before."
                )
            )
    if not math.isfinite(sums["divergence"]):
        raise FloatingPointError(
            f"The divergence is infinite, because one model excludes a token the other expects: {unchanged}. Remove "
            "what masks logits in one of the two, or take another `divergence`."
        )
    tokens = sums["tokens"]
    if tokens and vocabulary > 1 and sums["teacher_entropy"] / tokens > math.log(vocabulary) - _NEAR_UNIFORM:
        raise ValueError(
            f"The teacher gives all {vocabulary} tokens the same probability (entropy ln {vocabulary} = "
            f"{math.log(vocabulary):.4f} nats): its head is zeroed or was not loaded; {unchanged}. Load it again."
        )
