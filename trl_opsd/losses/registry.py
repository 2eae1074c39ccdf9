"""The divergences that have a name: configuration, command line and tests read them from here."""

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
"""What makes a divergence out of TRL's `beta`, by name; one more entry is one more objective."""

BETAS: MappingProxyType[str, float] = MappingProxyType({"forward_kl": 0.0, "reverse_kl": 1.0})
"""TRL's `beta` of those that have only one."""


def divergence_of(divergence: Divergence | str | None, beta: float) -> Divergence:
    """A divergence by its name, or as it is; `None` is what TRL's `beta` alone says.

    Args:
        divergence ([`Divergence`] or `str`, *optional*):
            A name is a key of [`DIVERGENCES`].
        beta (`float`):
            0 forward KL, 1 reverse KL, between: the generalised Jensen-Shannon divergence.
    """
    if isinstance(divergence, Divergence):
        return divergence
    if divergence is None:
        divergence = next((name for name, end in BETAS.items() if beta == end), "jsd")
    return DIVERGENCES[divergence](beta)
