"""Triton code of the divergences: what one entry of the vocabulary adds to each, and its slope.

Device functions are not annotated: their arguments are Triton's, which Python's types do not describe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import triton
import triton.language as tl

from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.entrywise import (
    ForwardKL,
    GeneralizedJSD,
    ReverseKL,
    SkewedForwardKL,
    SkewedReverseKL,
    TotalVariation,
)
from trl_opsd.losses.sampled import SampledReverseKL

__all__ = ["BALANCED", "KERNELS", "MEAN_GAP", "THIRD_PASS", "Kernel", "tanh"]

# How the sum of a row's slopes is known: it is 0, or the divergence itself (an entropy less a cross entropy), or
# unknown until the row has been read a third time.
BALANCED = tl.constexpr(0)
MEAN_GAP = tl.constexpr(1)
THIRD_PASS = tl.constexpr(2)


# ---- Arithmetic ------------------------------------------------------------------------------------------------------


@triton.jit
def _expm1(x):  # type: ignore[no-untyped-def]
    """`exp(x) - 1` with a relative error of a few roundings; Triton has none that its interpreter knows."""
    series = x * (
        1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * (1.0 + x / 7.0)))))
    )
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    """`log(1 + x)` with a relative error of a few roundings."""
    z = x / (2.0 + x)  # log1p(x) = 2 artanh(z)
    y = z * z
    series = 2.0 * z * (1.0 + y * (1.0 / 3 + y * (1.0 / 5 + y * (1.0 / 7 + y * (1.0 / 9)))))
    return tl.where(tl.abs(x) < 0.35, series, tl.log(1.0 + x))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    # A series near 0, where the difference of exponentials would cancel.
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315))))
    tail = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -tail, tail))


# ---- Terms and slopes of one column ----------------------------------------------------------------------------------
#
# What `Entrywise.terms` computes for a whole row: terms of at least 0, and their derivatives with respect to the
# student's log-probability. The gradient is `slope - p_s * sum(slope)`.


@triton.jit
def _kl_term(log_p, log_q, p, q):  # type: ignore[no-untyped-def]
    """Columns of `KL(p || q)` plus `q - p`, whose sum over the vocabulary is 0, so that no term is below 0."""
    # The rounding error of a normaliser shifts all gaps of a row alike and would exceed the value near agreement; in
    # `q - p` it has the opposite sign and cancels.
    gap = log_p - log_q
    return p * gap + tl.where(tl.abs(gap) < 0.35, p * _expm1(-gap), q - p)


@triton.jit
def _forward_kl(gap, log_s, log_t, s, t, setting):  # type: ignore[no-untyped-def]
    return _kl_term(log_t, log_s, t, s), s - t


@triton.jit
def _reverse_kl(gap, log_s, log_t, s, t, setting):  # type: ignore[no-untyped-def]
    return _kl_term(log_s, log_t, s, t), s * gap


@triton.jit
def _generalized_jsd(gap, log_s, log_t, s, t, beta):  # type: ignore[no-untyped-def]
    # log(m / p_s), exactly 0 where the models agree. Beyond a gap of 80 nats p_s contributes nothing to m.
    advantage = tl.minimum(log_t - log_s, 80.0)
    surplus = _log1p(beta * _expm1(advantage))
    slope = (beta - 1.0) * s * surplus
    return beta * t * (advantage - surplus) + slope, slope


@triton.jit
def _to_mixture(log_p, log_q, p, q, skew):  # type: ignore[no-untyped-def]
    """A term of `KL(q || m)` with `m = skew q + (1 - skew) p`, and `log(m / q)`."""
    gap = log_p - log_q
    # Beyond 80 nats the exponential overflows float32 soon, and q contributes nothing to m.
    surplus = (1.0 - skew) * _expm1(tl.minimum(gap, 80.0))
    rise = _log1p(surplus)
    return tl.where(gap > 80.0, (1.0 - skew) * p, q * (surplus - rise)), rise


@triton.jit
def _skewed_forward_kl(gap, log_s, log_t, s, t, skew):  # type: ignore[no-untyped-def]
    term, rise = _to_mixture(log_s, log_t, s, t, skew)
    return term, (skew - 1.0) * s * _expm1(-rise)


@triton.jit
def _skewed_reverse_kl(gap, log_s, log_t, s, t, skew):  # type: ignore[no-untyped-def]
    term, rise = _to_mixture(log_t, log_s, t, s, skew)
    return term, -s * (rise + skew * _expm1(-rise))


@triton.jit
def _total_variation(gap, log_s, log_t, s, t, setting):  # type: ignore[no-untyped-def]
    sign = tl.where(s > t, 0.5, tl.where(s < t, -0.5, 0.0))
    return sign * (s - t), sign * s


@triton.jit
def _of_sampled(gap, log_s, log_t, s, t, clip_max):  # type: ignore[no-untyped-def]
    """Nothing per entry: the kernel adds the value and gradient of the sampled token."""
    return 0.0 * s, 0.0 * s


@dataclass(frozen=True, slots=True)
class Kernel:
    """The device code of a divergence."""

    terms: Any
    """The device function."""
    total: int = THIRD_PASS.value
    """How the sum of the slopes is known where no entry is clipped: `BALANCED`, `MEAN_GAP` or `THIRD_PASS`."""
    drift: Callable[[float], float] = lambda _: 0.0
    """That of [`~losses.divergence.Terms`], from the divergence's setting."""


KERNELS: Mapping[type[Divergence], Kernel] = MappingProxyType(
    {
        ForwardKL: Kernel(_forward_kl, BALANCED.value, drift=lambda _: 1.0),
        ReverseKL: Kernel(_reverse_kl, MEAN_GAP.value, drift=lambda _: -1.0),
        GeneralizedJSD: Kernel(_generalized_jsd),
        SkewedForwardKL: Kernel(_skewed_forward_kl, drift=lambda skew: 1 - skew),
        SkewedReverseKL: Kernel(_skewed_reverse_kl, drift=lambda skew: skew - 1),
        TotalVariation: Kernel(_total_variation),
        SampledReverseKL: Kernel(_of_sampled, BALANCED.value),
    }
)
"""Device code by class, a dataclass whose first number is the setting; all other divergences are computed eagerly."""
