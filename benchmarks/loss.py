"""Measures the streamed loss beside TRL's and a dense one, in one process, on any device.

    python benchmarks/loss.py                                  # speed, memory, products and error
    python benchmarks/loss.py --vocab 151936 --tokens 2048 --peak-only --no-dense

S is one product with the student's head, T one with the teacher's. Peaks are above the inputs and the head's gradient
(understated where the peak comes before that gradient exists, as in the dense program: see its frozen head);
errors, of the value and of each gradient, are relative to the largest entry of the float64 oracle, on --error-tokens;
times are medians over interleaved repeats. --no-dense leaves out the dense program, which may not fit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import timing
import torch
from common import device, options, show
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from trl_opsd.losses import (
    Divergence,
    ForwardKL,
    GeneralizedJSD,
    LazyLogits,
    OutputHead,
    ReverseKL,
    dense_divergence,
    streamed_divergence,
)

DIVERGENCES = {"forward_kl": (ForwardKL(), 0.0), "reverse_kl": (ReverseKL(), 1.0), "jsd": (GeneralizedJSD(0.5), 0.5)}
Program = Callable[[LazyLogits, LazyLogits], Tensor]


def trl(student: LazyLogits, teacher: LazyLogits, beta: float) -> Tensor:
    sides = [(side.hidden, side.head.weight, None) for side in (student, teacher)]
    return ChunkedDivergenceFunction.apply(*sides[0], *sides[1], beta)[0]


def autograd(student: LazyLogits, teacher: LazyLogits, divergence: Divergence) -> Tensor:
    """The naive program: all logits, a float32 log-softmax, autograd."""
    logs = [(side.hidden @ side.head.weight.T).float().log_softmax(-1) for side in (student, teacher)]
    return divergence.value(*logs)


def programs(name: str) -> dict[str, Program]:
    divergence, beta = DIVERGENCES[name]
    return {
        "streamed": lambda student, teacher: streamed_divergence(student, teacher, divergence).divergence,
        "trl": partial(trl, beta=beta),
        "dense": partial(autograd, divergence=divergence),
    }


def make_pair(args: argparse.Namespace, tokens: int, frozen: bool) -> tuple[LazyLogits, LazyLogits]:
    """Two models whose logits have a standard deviation of about 3, as trained ones have."""
    torch.manual_seed(0)

    def side(width: int) -> LazyLogits:
        hidden = torch.randn(tokens, width, device=args.device)
        weight = torch.randn(args.vocab, width, device=args.device).mul_(3 / width**0.5)
        return LazyLogits(hidden.to(args.dtype), OutputHead(weight.to(args.dtype)))

    student, teacher = side(args.student_width), side(args.teacher_width)
    student.hidden.requires_grad_()
    student.head.weight.requires_grad_(not frozen)
    return student, teacher


def step(program: Program, student: LazyLogits, teacher: LazyLogits) -> tuple[Tensor, list[Tensor]]:
    value = program(student, teacher)
    wanted = [tensor for tensor in (student.hidden, student.head.weight) if tensor.requires_grad]
    return value.detach(), list(torch.autograd.grad(value.sum() / max(value.numel(), 1), wanted))


def products(program: Program, student: LazyLogits, teacher: LazyLogits) -> str:
    """The counted FLOPs of a step, as multiples of S and T."""

    def product(total: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    def counted(student: LazyLogits, teacher: LazyLogits) -> int:
        # Products that the counter omits (addmm_) or cannot parse (out_dtype=)
        mapping = {
            torch.ops.aten.addmm_: product,
            torch.ops.aten.addmm: product,
            torch.ops.aten.mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[1],
        }
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            step(program, student, teacher)
        return counter.get_total_flops()

    # Two teacher widths give two equations in the numbers of S and of T.
    unit = 2 * student.hidden.size(0) * student.head.weight.size(0)
    half = teacher.hidden.size(1) // 2
    narrow = replace(teacher, hidden=teacher.hidden[:, :half], head=OutputHead(teacher.head.weight[:, :half]))
    full = counted(student, teacher)
    of_teacher = (full - counted(student, narrow)) / (unit * (teacher.hidden.size(1) - half))
    of_student = (full - of_teacher * unit * teacher.hidden.size(1)) / (unit * student.hidden.size(1))
    return f"{of_student:g}S+{of_teacher:g}T"


def peak_bytes(program: Program, student: LazyLogits, teacher: LazyLogits) -> int:
    """Peak of the bytes allocated during a step, without those of the head's gradient."""
    weight = student.head.weight
    peak = timing.allocated(partial(step, program, student, teacher), weight.device)
    return peak - weight.requires_grad * weight.numel() * weight.element_size()


def errors(name: str, args: argparse.Namespace, frozen: bool) -> dict[str, list[float]]:
    """Largest error of the value and of each gradient, relative to the largest entry of the oracle's, on few tokens."""
    student, teacher = make_pair(args, min(args.tokens, args.error_tokens), frozen)
    wide = (
        student.hidden.detach().double().requires_grad_(),
        student.head.weight.detach().double().requires_grad_(not frozen),
    )

    def oracle(student: LazyLogits, teacher: LazyLogits) -> Tensor:
        return dense_divergence(student, teacher, DIVERGENCES[name][0]).divergence

    truth, truths = step(oracle, LazyLogits(wide[0], OutputHead(wide[1])), teacher)
    result = {}
    for program, run in programs(name).items():
        value, gradients = step(run, student, teacher)
        pairs = zip((value, *gradients), (truth, *truths), strict=True)
        result[program] = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return result


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for frozen in (False, True):
        pair = make_pair(args, args.tokens, frozen)
        for name in args.divergences:
            compared = {program: run for program, run in programs(name).items() if program != "dense" or args.dense}
            if not args.peak_only:
                error = errors(name, args, frozen)
                runs = {program: partial(step, run, *pair) for program, run in compared.items()}
                times = timing.in_turns(runs, pair[0].hidden.device, args.repeats)
            for program, run in compared.items():
                row = {"divergence": name, "head": "frozen" if frozen else "trainable", "program": program}
                row["peak_bytes"] = peak_bytes(run, *pair)
                if not args.peak_only:
                    row |= {"products": products(run, *pair), "seconds": statistics.median(times[program])}
                    row |= {"speed_over_trl": timing.ratio(times["trl"], times[program]), "errors": error[program]}
                rows.append(row)
    return rows


def main() -> None:
    args = options(
        __doc__,
        tokens=512,
        vocab=32000,
        student_width=896,
        teacher_width=1536,
        dtype=torch.float32,
        device=device(),
        divergences=list(DIVERGENCES),
        repeats=5,
        error_tokens=32,
        peak_only=False,
        dense=True,
    )
    show(measure(args), args.json)


if __name__ == "__main__":
    main()
