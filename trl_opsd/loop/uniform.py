"""Rejects a teacher whose distribution is uniform, from the sums of a loss; knows numbers, and no models."""

from __future__ import annotations

from collections.abc import Mapping


def check_not_uniform(sums: Mapping[str, float], vocabulary: int) -> None:
    """Rejects a teacher whose logits are equal at every token, from which the student would learn nothing.

    A high entropy alone is no reason: logits that differ little, as those of a tiny random model, are an opinion.
    """
    if not sums["tokens"] or vocabulary == 1 or sums["teacher_uniform"] < sums["tokens"]:
        return
    raise ValueError(
        f"The teacher gives all {vocabulary} tokens the same probability, its logits are equal: its head is zeroed or "
        "was not loaded; the student's weights are as they were before this step. Load it again."
    )
