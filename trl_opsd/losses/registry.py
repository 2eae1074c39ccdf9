"""The registry of named divergences, read by configuration, command line and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.entrywise import (
    AdaptiveKL,
    AlphaDivergence,
    EntropyAwareKL,
    ForwardKL,
    GeneralizedJSD,
    NegativeLogAcceptance,
    ReverseKL,
    SkewedForwardKL,
    SkewedReverseKL,
    TopKTeacher,
    TotalVariation,
)
from trl_opsd.losses.sampled import SampledReverseKL


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers that named divergences are made from; each divergence reads the few that it has."""

    beta: float = 1.0
    """TRL's: 0 forward KL, 1 reverse KL, between: the generalised Jensen-Shannon divergence."""
    skew: float = 0.1
    """Share of a skewed KL's own distribution in the mixture."""
    alpha: float = 0.5
    """Of the alpha-divergence: towards the reverse KL near 0, towards the forward KL near 1."""
    threshold: float = 0.8
    """Teacher's entropy in nats, above which the forward KL is added."""
    clip_max: float | None = 3.0
    """Largest importance weight of a sampled token; `None` for no bound."""
    clip_min: float | None = None
    """Smallest; a token below it has the weight 0. `None` for no bound."""
    top_k: int | None = None
    """The teacher's likeliest tokens that are compared one by one; `None` for all."""


DIVERGENCES: MappingProxyType[str, Callable[[Settings], Divergence]] = MappingProxyType(
    {
        "forward_kl": lambda given: ForwardKL(),
        "reverse_kl": lambda given: ReverseKL(),
        "jsd": lambda given: GeneralizedJSD(given.beta if 0.0 < given.beta < 1.0 else 0.5),
        "skewed_forward_kl": lambda given: SkewedForwardKL(given.skew),
        "skewed_reverse_kl": lambda given: SkewedReverseKL(given.skew),
        "total_variation": lambda given: TotalVariation(),
        "negative_log_acceptance": lambda given: NegativeLogAcceptance(),
        "alpha_divergence": lambda given: AlphaDivergence(given.alpha),
        "adaptive_kl": lambda given: AdaptiveKL(),
        "entropy_aware_kl": lambda given: EntropyAwareKL(given.threshold),
        "sampled_reverse_kl": lambda given: SampledReverseKL(given.clip_max, given.clip_min),
    }
)
"""Factories by name; a new entry is a new value of `divergence`, with the docstring of its class in the reference."""

BETAS: MappingProxyType[str, float] = MappingProxyType({"forward_kl": 0.0, "reverse_kl": 1.0})
"""TRL's `beta` of the divergences that correspond to a single value of it."""


def named_with(setting: str) -> tuple[str, ...]:
    """The names of the divergences that have this setting."""
    return tuple(name for name, make in DIVERGENCES.items() if hasattr(make(Settings()), setting))


def divergence_of(divergence: Divergence | str | None, given: Settings) -> Divergence:
    """Resolves a name, or `None` by TRL's `beta`, or passes an object through; `top_k` wraps either in buckets."""
    if divergence is None:
        divergence = next((name for name, end in BETAS.items() if given.beta == end), "jsd")
    found = divergence if isinstance(divergence, Divergence) else DIVERGENCES[divergence](given)
    # An object that already has buckets keeps its own K.
    if given.top_k is None or isinstance(found, TopKTeacher):
        return found
    return TopKTeacher(found, given.top_k)  # type: ignore[arg-type]  # which refuses what is not entrywise
