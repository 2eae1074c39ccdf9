"""Rejects a teacher whose distribution is uniform, from the sums of a loss; knows numbers, and no models."""

from __future__ import annotations

from collections.abc import Mapping


def check_not_uniform(sums: Mapping[str, float], vocabulary: int) -> None:
    """Refuses a loss from which the student would learn nothing, because the teacher's logits are equal at every token.

    A high entropy alone is no reason: logits that differ by little, as those of a tiny random model, are an opinion.

    Args:
        sums (`Mapping[str, float]`):
            Sums over all processes, by the names in [`LossParts.ROW_NAMES`]; finite.
        vocabulary (`int`):
            Number of token ids the two models share.

    Raises:
        ValueError: The teacher gives every token the same probability.
    """
    if not sums["tokens"] or vocabulary == 1 or sums["teacher_uniform"] < sums["tokens"]:
        return
    raise ValueError(
        f"The teacher gives all {vocabulary} tokens the same probability, its logits are equal: its head is zeroed or "
        "was not loaded; the student's weights are as they were before this step. Load it again."
    )
