"""Detects that nothing is learned: both models agree, no token counts, the gradient is 0, or the teacher is uniform.

Knows the sums of a loss over all processes, by the names in [`LossParts.ROW_NAMES`], and no models.
"""

from __future__ import annotations

from collections.abc import Mapping

_SAME = 1e-6
"""Nats per token: rounding error of the divergence between a float32 model and its copy."""

_ALIKE = 0.02
"""Nats per token: maximum difference of entropies where a KL is that small (Pinsker, Fannes), for any vocabulary."""


def agree(sums: Mapping[str, float]) -> bool:
    """Whether both models are identical: the divergence is 0 up to rounding, and the entropies are equal.

    A trained student stays far above. A surrogate of the user's own may be 0 where the models differ.
    """
    weight = sums["weight"]
    if not weight or abs(sums["divergence"]) / weight >= _SAME:
        return False
    return abs(sums["student_entropy"] - sums["teacher_entropy"]) / weight < _ALIKE


def nothing_learned(sums: Mapping[str, float], gradient_norm: float) -> str | None:
    """Why the student did not learn from an optimizer step, in words, or `None`.

    A gradient of 0 is right where both models [`agree`], as at the start of self-distillation.
    """
    if not sums["weight"]:
        return (
            "no token counts in its loss. All completions are empty or left out as truncated, or all weights from "
            "`weigh` or in the masks are 0"
        )
    if gradient_norm != 0 or agree(sums):
        return None
    return (
        f"its gradient is exactly 0, although the divergence is {sums['divergence'] / sums['weight']:.3g} nats per "
        "token and the models differ. The student's probabilities are saturated (a `temperature` far below 1), the "
        "gradient is below the range of its dtype, or the divergence is flat there, because it is bounded (`clamp`) or "
        "does not depend on the student"
    )


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
