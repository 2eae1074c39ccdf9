"""The loss: two models' hidden states and heads in, one divergence per token out; torch only."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from trl_opsd.losses.dense import dense_divergence
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.entrywise import (
    ForwardKL,
    GeneralizedJSD,
    NegativeLogAcceptance,
    ReverseKL,
    SkewedForwardKL,
    SkewedReverseKL,
    TopKTeacher,
    TotalVariation,
)
from trl_opsd.losses.reduce import reduce
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.losses.streamed import streamed_divergence
from trl_opsd.types import LazyLogits, OutputHead, PerToken, ReferenceModel, Sampled

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "ForwardKL",
    "GeneralizedJSD",
    "LazyLogits",
    "NegativeLogAcceptance",
    "OutputHead",
    "PerToken",
    "ReferenceModel",
    "ReverseKL",
    "Sampled",
    "SampledReverseKL",
    "SkewedForwardKL",
    "SkewedReverseKL",
    "TopKTeacher",
    "TotalVariation",
    "dense_divergence",
    "reduce",
    "streamed_divergence",
]

DIVERGENCES: MappingProxyType[str, type[Divergence]] = MappingProxyType(
    {
        "forward_kl": ForwardKL,
        "reverse_kl": ReverseKL,
        "jsd": GeneralizedJSD,
        "skewed_forward_kl": SkewedForwardKL,
        "skewed_reverse_kl": SkewedReverseKL,
        "total_variation": TotalVariation,
        "negative_log_acceptance": NegativeLogAcceptance,
        "sampled_reverse_kl": SampledReverseKL,
    }
)
"""Classes by name; a new entry is a new value of `divergence`, with its docstring in the reference."""

BETAS: MappingProxyType[float, str] = MappingProxyType({0.0: "forward_kl", 1.0: "reverse_kl"})
"""The divergences that correspond to a single value of TRL's `beta`."""


def divergence_of(given: Any, beta: float = 1.0, top_k: int | None = None) -> Divergence:
    """The objective that a name stands for, a mapping of one name to its settings, or a divergence itself.

    `None` is what TRL's `beta` selects: 0 the forward KL, 1 the reverse KL, between them the JSD. `top_k` compares
    buckets of the teacher's likeliest tokens; an object that has buckets already keeps its own.

    Raises:
        ValueError: It is none of these.
    """
    found = given if isinstance(given, Divergence) else _named(BETAS.get(beta, "jsd") if given is None else given, beta)
    if top_k is None or isinstance(found, TopKTeacher):
        return found
    return TopKTeacher(found, top_k)  # type: ignore[arg-type]  # which refuses what is not entrywise


def _named(given: Any, beta: float) -> Divergence:
    name, settings = given, dict[str, Any]()
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, settings),) = given.items()
    if name not in DIVERGENCES:
        close = get_close_matches(str(name), DIVERGENCES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"`divergence={given!r}`: expected one of {', '.join(map(repr, DIVERGENCES))}, one of them with its "
            f"settings, as {{'skewed_reverse_kl': {{'skew': 0.5}}}}, or an instance of `Divergence`.{hint}"
        )
    kind = DIVERGENCES[name]
    return GeneralizedJSD(beta) if kind is GeneralizedJSD and not settings and beta not in BETAS else kind(**settings)
