"""Notices that a teacher says the same as the student about every token, from the sums of a loss; knows no models."""

from __future__ import annotations

from collections.abc import Mapping

_SAME = 1e-6
"""Nats per token: what rounding leaves of the divergence between a float32 model and its copy."""


def agree(sums: Mapping[str, float]) -> bool:
    """Whether the divergence is 0 up to rounding, as that of a model from itself; a trained student stays far above.

    Args:
        sums (`Mapping[str, float]`):
            Sums over all processes, by the names in [`LossParts.ROW_NAMES`]; finite.
    """
    return sums["weight"] > 0 and abs(sums["divergence"]) / sums["weight"] < _SAME
