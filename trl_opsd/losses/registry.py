"""The registry of named divergences, read by configuration, command line and tests."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from trl_opsd.losses.divergence import Divergence, ForwardKL, GeneralizedJSD, ReverseKL

DIVERGENCES: MappingProxyType[str, Callable[[float], Divergence]] = MappingProxyType(
    {
        "forward_kl": lambda beta: ForwardKL(),
        "reverse_kl": lambda beta: ReverseKL(),
        "jsd": lambda beta: GeneralizedJSD(beta if 0.0 < beta < 1.0 else 0.5),
    }
)
"""Factories from TRL's `beta`, by name; a new entry is a new value of `divergence`."""

BETAS: MappingProxyType[str, float] = MappingProxyType({"forward_kl": 0.0, "reverse_kl": 1.0})
"""TRL's `beta` of the divergences that correspond to a single value of it."""


def divergence_of(divergence: Divergence | str | None, beta: float) -> Divergence:
    """Resolves a divergence: an object is returned unchanged, a name is looked up, `None` is decided by TRL's `beta`.

    Args:
        divergence ([`Divergence`] or `str`, *optional*):
            A divergence, or a key of [`DIVERGENCES`].
        beta (`float`):
            0 forward KL, 1 reverse KL, between: the generalised Jensen-Shannon divergence.
    """
    if isinstance(divergence, Divergence):
        return divergence
    if divergence is None:
        divergence = next((name for name, end in BETAS.items() if beta == end), "jsd")
    return DIVERGENCES[divergence](beta)
