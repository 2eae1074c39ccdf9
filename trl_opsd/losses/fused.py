"""The elementwise part of a tile in one Triton kernel, which reads each logit two or three times and writes it once.

Eagerly, each step of the arithmetic reads and writes the tile in device memory. Here a program reads a row of both
models once for its normalisers and entropies, and once more for the value and the gradient; divergences whose gradient
contains a sum over the vocabulary that is not known by then read it a third time.

R rows (tokens) · V vocabulary size, of which rows of tiles hold a multiple of 64

Functions of the device are not annotated: their arguments are Triton's, which Python's types do not describe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from trl_opsd.losses.divergence import Divergence, ForwardKL, GeneralizedJSD, ReverseKL
from trl_opsd.losses.elementwise import INFINITE, Finish

__all__ = ["KERNELS", "Kernel", "fused_"]

_BLOCK = 2048
"""Columns that a program reads at once."""
_WARPS = 8
"""Warps of a program: with them no register is spilled, and 16 bytes are read at once."""
_ALIGNED = 64
"""Rows of tiles are stored in multiples of so many columns."""

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""The logit of an excluded token: its probability is 0, and 0 * log 0 = 0."""
_INFINITE = tl.constexpr(INFINITE)

_CONSTANT = tl.constexpr(0)
_MEAN_GAP = tl.constexpr(1)
_THIRD_PASS = tl.constexpr(2)


# ---- The divergences: value and slope of one column ------------------------------------------------------------------
#
# A divergence is a sum over the vocabulary of a term of two log-probabilities. A device function returns the term and
# its derivative with respect to the student's log-probability, up to a multiple of the student's probability, which
# has no effect: the gradient is `slope - p_s * sum(slope)`.


@triton.jit
def _kl_term(log_p, log_q, p, q):  # type: ignore[no-untyped-def]
    """Columns of `KL(p || q)`, plus the difference of both probabilities, whose sum is 0, so that none is below 0.

    A rounding error of a normaliser shifts all gaps alike, and would be larger than the value near agreement.
    """
    gap = log_p - log_q
    return p * gap + tl.where(tl.abs(gap) < 0.35, p * _expm1(-gap), q - p)


@triton.jit
def _forward_kl(gap, log_s, log_t, s, t, beta):  # type: ignore[no-untyped-def]
    return _kl_term(log_t, log_s, t, s), -t


@triton.jit
def _reverse_kl(gap, log_s, log_t, s, t, beta):  # type: ignore[no-untyped-def]
    return _kl_term(log_s, log_t, s, t), s * gap


@triton.jit
def _generalized_jsd(gap, log_s, log_t, s, t, beta):  # type: ignore[no-untyped-def]
    # log(m / p_s), exactly 0 where the models agree. Beyond a gap of 80 nats p_s contributes nothing to m.
    advantage = tl.minimum(log_t - log_s, 80.0)
    surplus = _log1p(beta * _expm1(advantage))
    slope = (beta - 1.0) * s * surplus
    return beta * t * (advantage - surplus) + slope, slope


@dataclass(frozen=True, slots=True)
class Kernel:
    """The device code of a divergence.

    Attributes:
        terms: the device function.
        total: how the sum of the slopes is known: as the constant -1, as the divergence itself, which is an entropy
            less a cross entropy, or by reading the row a third time.
    """

    terms: Any
    total: int


KERNELS: Mapping[type[Divergence], Kernel] = MappingProxyType(
    {
        ForwardKL: Kernel(_forward_kl, _CONSTANT.value),
        ReverseKL: Kernel(_reverse_kl, _MEAN_GAP.value),
        GeneralizedJSD: Kernel(_generalized_jsd, _THIRD_PASS.value),
    }
)
"""Device code by class; a divergence without goes through the eager steps."""


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
def _tanh(x):  # type: ignore[no-untyped-def]
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315))))
    tail = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -tail, tail))


@triton.jit
def _logits(row, bias, cap, columns, width, padded, BIAS: tl.constexpr, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finished logits of a block of columns of a row, the lowest float32 beyond the vocabulary."""
    stored = columns < padded  # a multiple of 64, so that loads stay wide
    x = tl.load(row + columns, mask=stored, other=0.0)
    if BIAS:
        x += tl.load(bias + columns, mask=stored, other=0.0)
        x = tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    if CAP:
        x = cap * _tanh(x)
    return tl.where(columns < width, x, _LOWEST)


# ---- The kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    student,
    teacher,
    gradient,
    student_bias,
    teacher_bias,
    weights,
    statistics,
    rows,
    width,
    padded,
    student_stride,
    teacher_stride,
    gradient_stride,
    student_cap,
    teacher_cap,
    beta,
    TERMS: tl.constexpr,
    TOTAL: tl.constexpr,
    STUDENT_BIAS: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
    STUDENT_CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: statistics [4, R] and, in place of the logits or apart, the gradient."""
    number = tl.program_id(0)
    row = number.to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    gradient += row * gradient_stride

    # Largest logit, sum of exponentials, and their sum times the logits, both relative to the largest so far.
    top_s = _LOWEST
    top_t = _LOWEST
    sum_s, sum_t, moment_s, moment_t, cross = 0.0, 0.0, 0.0, 0.0, 0.0
    for start in range(0, padded, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _logits(student, student_bias, student_cap, columns, width, padded, STUDENT_BIAS, STUDENT_CAP)
        y = _logits(teacher, teacher_bias, teacher_cap, columns, width, padded, TEACHER_BIAS, TEACHER_CAP)
        new_s, new_t = tl.maximum(top_s, tl.max(x, 0)), tl.maximum(top_t, tl.max(y, 0))
        scale_s, scale_t = tl.exp(top_s - new_s), tl.exp(top_t - new_t)
        exp_s, exp_t = tl.exp(x - new_s), tl.exp(y - new_t)
        moment_s = (moment_s + (top_s - new_s) * sum_s) * scale_s + tl.sum(exp_s * (x - new_s), 0)
        moment_t = (moment_t + (top_t - new_t) * sum_t) * scale_t + tl.sum(exp_t * (y - new_t), 0)
        if TOTAL == _MEAN_GAP:
            cross = cross * scale_s + tl.sum(exp_s * (x - y), 0)
        sum_s, sum_t = sum_s * scale_s + tl.sum(exp_s, 0), sum_t * scale_t + tl.sum(exp_t, 0)
        top_s, top_t = new_s, new_t
    log_s, log_t = tl.log(sum_s), tl.log(sum_t)

    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights + number)
    total = -1.0
    if TOTAL == _MEAN_GAP:
        total = cross / sum_s
    value, slopes = 0.0, 0.0
    for start in range(0, padded, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _logits(student, student_bias, student_cap, columns, width, padded, STUDENT_BIAS, STUDENT_CAP)
        y = _logits(teacher, teacher_bias, teacher_cap, columns, width, padded, TEACHER_BIAS, TEACHER_CAP)
        term, slope, ps = _terms(x, y, top_s, top_t, log_s, log_t, beta, TERMS)
        value += tl.sum(term, 0)
        if TOTAL == _THIRD_PASS:
            slopes += tl.sum(slope, 0)
        elif GRADIENT:
            _store(gradient, columns, padded, slope - ps * total, weight, x, student_cap, STUDENT_CAP)
    if GRADIENT and TOTAL == _THIRD_PASS:
        for start in range(0, padded, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _logits(student, student_bias, student_cap, columns, width, padded, STUDENT_BIAS, STUDENT_CAP)
            y = _logits(teacher, teacher_bias, teacher_cap, columns, width, padded, TEACHER_BIAS, TEACHER_CAP)
            _, slope, ps = _terms(x, y, top_s, top_t, log_s, log_t, beta, TERMS)
            _store(gradient, columns, padded, slope - ps * slopes, weight, x, student_cap, STUDENT_CAP)

    value = tl.where(value > _INFINITE, float("inf"), value)
    value = tl.where(weight == 0.0, 0.0, value * weight)  # 0 * inf is NaN
    tl.store(statistics + number, value)
    tl.store(statistics + rows + number, log_s - moment_s / sum_s)
    tl.store(statistics + 2 * rows + number, log_t - moment_t / sum_t)
    tl.store(statistics + 3 * rows + number, sum_t / width)


@triton.jit
def _terms(x, y, top_s, top_t, log_s, log_t, beta, TERMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The terms and slopes of a block of logits, and the student's probabilities."""
    log_ps, log_pt = x - top_s - log_s, y - top_t - log_t
    ps = tl.exp(log_ps)
    term, slope = TERMS(x - y, log_ps, log_pt, ps, tl.exp(log_pt), beta)
    return term, slope, ps


@triton.jit
def _store(gradient, columns, padded, slope, weight, x, cap, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a block of the gradient, also beyond the vocabulary, so that stores stay wide."""
    if CAP:
        ratio = x / cap
        slope *= 1.0 - ratio * ratio
    tl.store(gradient + columns, (slope * weight).to(gradient.dtype.element_ty), mask=columns < padded)


def fused_(
    divergence: Divergence,
    finishes: tuple[Finish, Finish],
    student_RV: Tensor,
    teacher_RV: Tensor,
    weights_R: Tensor | None,
    gradient_RV: Tensor | None,
) -> Tensor:
    """What [`eager_`] does, in one kernel, for the divergences of [`KERNELS`].

    Tiles of logits and of the gradient have rows in memory of at least the next multiple of 64 columns, of which those
    beyond V are overwritten.
    """
    rows, width = student_RV.shape
    padded = -(-width // _ALIGNED) * _ALIGNED
    student, teacher = finishes
    biases = [None if one.bias is None else pad(one.bias, (0, padded - width)) for one in finishes]
    weights_R = None if weights_R is None else weights_R.float().contiguous()  # it may be one expanded number
    kernel = KERNELS[type(divergence)]
    statistics_4R = torch.empty(4, rows, device=student_RV.device)
    out_RV = student_RV if gradient_RV is None else gradient_RV
    _rows[(rows,)](
        student_RV,
        teacher_RV,
        out_RV,
        *(student_RV if bias is None else bias for bias in biases),
        student_RV if weights_R is None else weights_R,
        statistics_4R,
        rows,
        width,
        padded,
        student_RV.stride(0),
        teacher_RV.stride(0),
        out_RV.stride(0),
        student.cap or 1.0,
        teacher.cap or 1.0,
        float(getattr(divergence, "beta", 0.0)),
        TERMS=kernel.terms,
        TOTAL=kernel.total,
        STUDENT_BIAS=student.bias is not None,
        TEACHER_BIAS=teacher.bias is not None,
        STUDENT_CAP=student.cap is not None,
        TEACHER_CAP=teacher.cap is not None,
        WEIGHTED=weights_R is not None,
        GRADIENT=gradient_RV is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return statistics_4R
