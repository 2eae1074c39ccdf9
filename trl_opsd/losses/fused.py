"""The elementwise part of a tile in one Triton kernel, which reads each logit two or three times and writes it once.

Eagerly, each step of the arithmetic reads and writes the tile in device memory. Here a program reads a row of both
models once for normalisers and entropies, and again for value and gradient; divergences whose gradient contains a sum
over the vocabulary that is not known by then read it a third time.

R rows (tokens) · V vocabulary size; rows of tiles hold a multiple of 64 entries

Device functions are not annotated: their arguments are Triton's, which Python's types do not describe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from trl_opsd.losses.device import KERNELS, MEAN_GAP, THIRD_PASS, tanh
from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.elementwise import FARTHEST, INFINITE, STATISTICS, Finish, Push
from trl_opsd.losses.sampled import SampledReverseKL
from trl_opsd.types import Sampled

__all__ = ["KERNELS", "fused_", "fused_target_"]

_WARPS = 8
"""Warps of a program: with them no register is spilled, and 16 bytes are read at once."""
_LANES = 32 * _WARPS
"""Threads of a program. Each keeps sums and maxima of its own columns, combined once per row: a reduction across
threads for each block of columns would cost more than the block's arithmetic."""
_BLOCK = 8 * _LANES
"""Columns that a program reads at once."""
_TARGET_BLOCK = 4 * _LANES
"""The same where threads write float32, 16 bytes each at once: with more, threads exchange columns."""
_ALIGNED = 64
"""Rows of tiles are stored in multiples of so many columns."""

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""The logit of an excluded token: its probability is 0, and 0 * log 0 = 0."""
_SMALL = tl.constexpr(2.0**-14)
"""Times which gaps are added up by thread: those to an excluded token may be all that it has seen, and are forgotten by
a product with 0, which they must be finite for."""
_INFINITE = tl.constexpr(INFINITE)
_FARTHEST = tl.constexpr(FARTHEST)


@triton.jit
def _logits(row, bias, cap, columns, width, padded):  # type: ignore[no-untyped-def]
    """Finished logits of a block of columns of a row, the lowest float32 beyond the vocabulary."""
    stored = columns < padded  # a multiple of 64, so that loads stay wide
    x = tl.load(row + columns, mask=stored, other=0.0)
    if bias is not None:
        x += tl.load(bias + columns, mask=stored, other=0.0)
        x = tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    if cap is not None:
        x = cap * tanh(x)
    return tl.where(columns < width, x, _LOWEST)


@triton.jit(do_not_specialize=["rows"])  # else it is compiled again for some numbers of rows
def _rows(  # type: ignore[no-untyped-def]
    student,
    teacher,
    gradient,
    student_bias,
    teacher_bias,
    weights,
    ids,
    nll_weights,
    logprobs,
    statistics,
    rows,
    width,
    padded,
    student_stride,
    teacher_stride,
    gradient_stride,
    student_cap,
    teacher_cap,
    setting,
    floor,
    drift,
    clip,
    TERMS: tl.constexpr,
    TOTAL: tl.constexpr,
    POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row: statistics [10, R], and the gradient in place of the logits or elsewhere. What is absent is `None`."""
    number = tl.program_id(0)
    row = number.to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    if gradient is not None:
        gradient += row * gradient_stride

    chosen = -1
    if ids is not None:  # read before any other warp may write the gradient in its place
        chosen = tl.load(ids + number).to(tl.int32)
        chosen_s = _logits(student, student_bias, student_cap, chosen, width, padded)
        chosen_t = _logits(teacher, teacher_bias, teacher_cap, chosen, width, padded)

    # Online softmax, per thread: largest logit so far, the sum of exponentials and the sum of exponentials times
    # logits, both relative to that largest; and whether one column has the largest logit of both models.
    nothing = tl.zeros((LANES,), tl.float32)
    tops_s, tops_t = nothing + _LOWEST, nothing + _LOWEST
    sums_s, sums_t, moments_s, moments_t, crosses, sames = nothing, nothing, nothing, nothing, nothing, nothing
    block = tl.arange(0, LANES)[:, None] * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)[None, :]
    for start in range(0, padded, BLOCK):
        columns = start + block
        x = _logits(student, student_bias, student_cap, columns, width, padded)
        y = _logits(teacher, teacher_bias, teacher_cap, columns, width, padded)
        new_s, new_t = tl.maximum(tops_s, tl.max(x, 1)), tl.maximum(tops_t, tl.max(y, 1))
        gaps_s, gaps_t = x - new_s[:, None], y - new_t[:, None]
        exp_s, exp_t = tl.exp(gaps_s), tl.exp(gaps_t)
        scale_s, moments_s = _rescaled(tops_s - new_s, sums_s, moments_s)
        scale_t, moments_t = _rescaled(tops_t - new_t, sums_t, moments_t)
        moments_s += tl.sum(exp_s * gaps_s, 1)
        moments_t += tl.sum(exp_t * gaps_t, 1)
        if TOTAL == MEAN_GAP:
            crosses = crosses * scale_s + tl.sum(exp_s * ((x - y) * _SMALL), 1)
        sums_s, sums_t = sums_s * scale_s + tl.sum(exp_s, 1), sums_t * scale_t + tl.sum(exp_t, 1)
        both = tl.max(tl.where((gaps_s >= 0.0) & (gaps_t >= 0.0), 1.0, 0.0), 1)
        sames = tl.where((new_s > tops_s) | (new_t > tops_t), both, tl.maximum(sames, both))
        tops_s, tops_t = new_s, new_t
    top_s, top_t = tl.max(tops_s, 0), tl.max(tops_t, 0)
    scale_s, moments_s = _rescaled(tops_s - top_s, sums_s, moments_s)
    scale_t, moments_t = _rescaled(tops_t - top_t, sums_t, moments_t)
    moment_s, moment_t = tl.sum(moments_s, 0), tl.sum(moments_t, 0)
    sum_s, sum_t = tl.sum(sums_s * scale_s, 0), tl.sum(sums_t * scale_t, 0)
    same = tl.max(tl.where((tops_s >= top_s) & (tops_t >= top_t), sames, 0.0), 0)
    log_s, log_t = tl.log(sum_s), tl.log(sum_t)

    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + number)
    total = 0.0
    if TOTAL == MEAN_GAP:
        total = tl.sum(crosses * scale_s, 0) / sum_s / _SMALL
    value = 0.0
    values, slope_sums, most = nothing, nothing, nothing
    nll, first, force, importance, log_ps = 0.0, 0.0, 0.0, 1.0, 0.0
    if ids is not None:
        log_ps, log_pt = chosen_s - top_s - log_s, chosen_t - top_t - log_t
        first = tl.where(chosen_t >= top_t, 1.0, 0.0)
        if nll_weights is not None:
            force = tl.load(nll_weights + number)
            nll = -force * log_ps
        if POLICY:
            if logprobs is not None:
                ratio = tl.exp(log_ps - tl.load(logprobs + number))
                importance = tl.where(ratio < floor, 0.0, tl.minimum(ratio, setting))
            value = importance * (log_ps - log_pt)
            force -= value
        total -= force  # the sum of the slopes, to which the sampled token adds
    # Stored now, they take no registers in what follows.
    tl.store(statistics + rows + number, log_s - moment_s / sum_s)
    tl.store(statistics + 2 * rows + number, log_t - moment_t / sum_t)
    tl.store(statistics + 3 * rows + number, sum_t / width)
    tl.store(statistics + 5 * rows + number, _weighted(nll, weight))
    tl.store(statistics + 6 * rows + number, same)
    tl.store(statistics + 7 * rows + number, first)
    tl.store(statistics + 8 * rows + number, importance)
    tl.store(statistics + 9 * rows + number, log_ps)
    for start in range(0, padded, BLOCK):
        columns = start + block
        x = _logits(student, student_bias, student_cap, columns, width, padded)
        y = _logits(teacher, teacher_bias, teacher_cap, columns, width, padded)
        term, slope, ps, cut = _terms(x, y, top_s, top_t, log_s, log_t, setting, drift, clip, TERMS)
        values += tl.sum(term, 1)
        if clip is not None:
            most = tl.maximum(most, tl.max(cut, 1))
        if TOTAL == THIRD_PASS:
            slope_sums += tl.sum(slope, 1)
        elif gradient is not None:
            slope -= ps * total
            if POLICY or nll_weights is not None:
                slope -= tl.where(columns == chosen, force, 0.0)
            _store(gradient, columns, padded, slope, weight, x, student_cap)
    if gradient is not None and TOTAL == THIRD_PASS:
        slopes = tl.sum(slope_sums, 0) - force
        for start in range(0, padded, BLOCK):
            columns = start + block
            x = _logits(student, student_bias, student_cap, columns, width, padded)
            y = _logits(teacher, teacher_bias, teacher_cap, columns, width, padded)
            _, slope, ps, _ = _terms(x, y, top_s, top_t, log_s, log_t, setting, drift, clip, TERMS)
            slope -= ps * slopes
            if POLICY or nll_weights is not None:
                slope -= tl.where(columns == chosen, force, 0.0)
            _store(gradient, columns, padded, slope, weight, x, student_cap)

    tl.store(statistics + number, _weighted(value + tl.sum(values, 0), weight))
    tl.store(statistics + 4 * rows + number, tl.max(most, 0))


@triton.jit
def _rescaled(down, sums, moments):  # type: ignore[no-untyped-def]
    """The factor of sums whose running maximum rose by `-down`, and the moments after it."""
    scale = tl.exp(down)  # 0 where there was none yet: multiplied first, so that nothing overflows
    return scale, moments * scale + (down * scale) * sums


@triton.jit
def _weighted(value, weight):  # type: ignore[no-untyped-def]
    """Nats times weight; infinite beyond what finite logits can cause."""
    value = tl.where(value > _INFINITE, float("inf"), tl.where(value < -_INFINITE, float("-inf"), value))
    return tl.where(weight == 0.0, 0.0, value * weight)  # 0 * inf is NaN


@triton.jit
def _terms(  # type: ignore[no-untyped-def]
    x, y, top_s, top_t, log_s, log_t, setting, drift, clip, TERMS: tl.constexpr
):
    """The terms and slopes of a block of logits, the student's probabilities, and 1 where an entry was clipped."""
    log_ps, log_pt = x - top_s - log_s, y - top_t - log_t
    ps, pt = tl.exp(log_ps), tl.exp(log_pt)
    cut = 0.0
    if clip is not None:
        # With a clip only some slopes are summed, so a constant shift no longer cancels: the gap must be normalised.
        term, slope = TERMS(log_ps - log_pt, log_ps, log_pt, ps, pt, setting)
        shift = drift * (ps - pt)
        is_cut = term - shift > clip
        term, slope = tl.where(is_cut, clip + shift, term), tl.where(is_cut, drift * ps, slope)
        cut = tl.where(is_cut, 1.0, 0.0)
    else:
        term, slope = TERMS(x - y, log_ps, log_pt, ps, pt, setting)
    return term, slope, ps, cut


@triton.jit
def _store(gradient, columns, padded, slope, weight, x, cap):  # type: ignore[no-untyped-def]
    """Writes a block of the gradient, also beyond the vocabulary, so that stores stay wide."""
    if cap is not None:
        ratio = x / cap
        slope *= 1.0 - ratio * ratio
    tl.store(gradient + columns, (slope * weight).to(gradient.dtype.element_ty), mask=columns < padded)


def fused_(
    divergence: Divergence,
    clip: float | None,
    finishes: tuple[Finish, Finish],
    student_RV: Tensor,
    teacher_RV: Tensor,
    weights_R: Tensor | None,
    sampled: Sampled | None,
    gradient_RV: Tensor | None,
) -> Tensor:
    """What [`eager_`] does, in one kernel, for the divergences of [`KERNELS`]; columns beyond V are overwritten."""
    rows, width = student_RV.shape
    # Rows of tiles in memory have at least `padded` columns, so that loads and stores stay 16 bytes wide.
    padded = -(-width // _ALIGNED) * _ALIGNED
    student, teacher = finishes
    biases = [None if one.bias is None else pad(one.bias, (0, padded - width)) for one in finishes]
    weights_R = None if weights_R is None else weights_R.float().contiguous()  # it may be one expanded number
    kernel = KERNELS[type(divergence)]
    total = kernel.total if clip is None else THIRD_PASS.value
    setting = next(iter(astuple(divergence)), 0.0)  # type: ignore[call-overload]  # those with a kernel are dataclasses
    setting = math.inf if setting is None else float(setting)
    policy = isinstance(divergence, SampledReverseKL)
    drawn = [None] * 3 if sampled is None else [sampled.ids, sampled.nll_weight, sampled.logprobs if policy else None]
    statistics_10R = torch.empty(STATISTICS, rows, device=student_RV.device)
    tiles = [one for one in (student_RV, teacher_RV, gradient_RV) if one is not None]
    assert min(one.stride(0) for one in tiles) >= padded, "rows end before those 64 columns"
    with torch.accelerator.device_index(student_RV.device.index):  # Triton launches on the current one
        _rows[(rows,)](
            student_RV,
            teacher_RV,
            gradient_RV,
            *biases,
            weights_R,
            drawn[0],
            *(None if one is None else one.float().contiguous() for one in drawn[1:]),
            statistics_10R,
            rows,
            width,
            padded,
            *(one.stride(0) for one in (student_RV, teacher_RV, tiles[-1])),
            student.cap,
            teacher.cap,
            setting,
            (divergence.clip_min or 0.0) if isinstance(divergence, SampledReverseKL) else 0.0,
            kernel.drift(setting),
            clip,
            TERMS=kernel.terms,
            TOTAL=total,
            POLICY=policy,
            BLOCK=_BLOCK,
            LANES=_LANES,
            num_warps=_WARPS,
        )
    return statistics_10R


# ---- The target, where other models stand beside the teacher ---------------------------------------------------------


@triton.jit
def _targets(  # type: ignore[no-untyped-def]
    teacher,
    others,
    biases,
    caps,
    pushes,
    bounds,
    stride,
    width,
    padded,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One row: the target's logits in place of the teacher's products. Tuples have an entry per model."""
    row = tl.program_id(0).to(tl.int64) * stride
    block = tl.arange(0, LANES)[:, None] * (BLOCK // LANES) + tl.arange(0, BLOCK // LANES)[None, :]
    total = _total(teacher + row, biases[0], caps[0], block, width, padded, BLOCK, LANES)
    shifts = ()
    for number in tl.static_range(len(others)):
        bias, cap = biases[number + 1], caps[number + 1]
        other = _total(others[number] + row, bias, cap, block, width, padded, BLOCK, LANES)
        shifts += (total - other,)  # type: ignore[assignment]
    for start in range(0, padded, BLOCK):
        columns = start + block
        y = _logits(teacher + row, biases[0], caps[0], columns, width, padded)
        target = y
        for number in tl.static_range(len(others)):
            z = _logits(others[number] + row, biases[number + 1], caps[number + 1], columns, width, padded)
            gap = y - z - shifts[number]
            if bounds[number] is not None:
                gap = bounds[number] * tanh(gap / bounds[number])
            elif biases[0] is not None or biases[number + 1] is not None:
                gap = tl.where(gap > _FARTHEST, _FARTHEST, tl.where(gap < -_FARTHEST, -_FARTHEST, gap))
            target += pushes[number] * gap
        tl.store(teacher + row + columns, target, mask=columns < padded)


@triton.jit
def _total(row, bias, cap, block, width, padded, BLOCK: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The normaliser of a row, `log(sum(exp(logits)))`."""
    tops = tl.zeros((LANES,), tl.float32) + _LOWEST
    sums = tl.zeros((LANES,), tl.float32)
    for start in range(0, padded, BLOCK):
        x = _logits(row, bias, cap, start + block, width, padded)
        new = tl.maximum(tops, tl.max(x, 1))
        sums = sums * tl.exp(tops - new) + tl.sum(tl.exp(x - new[:, None]), 1)
        tops = new
    top = tl.max(tops, 0)
    return top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))


def fused_target_(finishes: Sequence[Finish], products: Sequence[Tensor], pushes: Sequence[Push]) -> None:
    """What [`target_`] does, in one kernel; columns beyond V are overwritten."""
    (rows, width), stride = products[0].shape, products[0].stride(0)
    padded = -(-width // _ALIGNED) * _ALIGNED
    assert all(one.stride(0) == stride >= padded for one in products), "one stride, at which those 64 columns end"
    with torch.accelerator.device_index(products[0].device.index):
        _targets[(rows,)](
            products[0],
            tuple(products[1:]),
            tuple(None if one.bias is None else pad(one.bias, (0, padded - width)) for one in finishes),
            tuple(one.cap for one in finishes),
            tuple(float(push) for push, _ in pushes),
            tuple(None if bound is None else float(bound) for _, bound in pushes),
            stride,
            width,
            padded,
            BLOCK=_TARGET_BLOCK,
            LANES=_LANES,
            num_warps=_WARPS,
        )
