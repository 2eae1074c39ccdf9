"""Measures a teacher whose rows share a prefix: tokens and seconds of a step, beside whole rows.

    python benchmarks/shared_prefix.py                                     # a small model, on any device
    python benchmarks/shared_prefix.py --model 7B --dtype bfloat16 --layers 0 --shared 2000

Each of 8 rows has 50 to 200 tokens of its own after the shared ones. "first" is the step that reads the prefix, "later"
one that has it kept, in --gigabytes at most. Models are those of `teacher.py`; the rows of a step differ from those of
the step before.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from common import device, options, show
from teacher import PLACEMENTS, SHAPES, make_model
from timing import once

from trl_opsd.models.weights import cached_per_token
from trl_opsd.teacher import FrozenTeacher
from trl_opsd.types import Rollout

ROWS, REST, COMPLETION = 8, (50, 200), 40


def steps(args: argparse.Namespace, shared: int) -> list[Rollout]:
    """The rows of three steps: the shared tokens, and others after them."""
    draw = random.Random(0)

    def ids(number: int) -> list[int]:
        return [draw.randrange(SHAPES[args.model][5]) for _ in range(number)]

    document, found = ids(shared), []
    for _ in range(3):
        rests = [draw.randint(*REST) - COMPLETION for _ in range(ROWS)]
        prompts = [[*document, *ids(rest)] for rest in rests]
        found.append(Rollout.of(prompts, [ids(COMPLETION) for _ in rests], args.device))
    return found


def measure(args: argparse.Namespace, shared: int, placement: str) -> dict[str, Any]:
    args.length = shared + max(REST)
    given = steps(args, shared)
    whole = FrozenTeacher(PLACEMENTS[placement](make_model(args), args.device))
    placed = PLACEMENTS[placement](make_model(args), args.device)
    sharing = FrozenTeacher(placed, prefix_bytes=args.gigabytes * 1e9)
    outputs: dict[str, torch.Tensor] = {}

    def read(name: str, teacher: FrozenTeacher, rollout: Rollout) -> float:
        return once(lambda: outputs.update({name: teacher.targets(rollout).hidden}), args.device)

    small = Rollout.of([[1, 2, 3]], [[4, 5]], args.device)
    for teacher in (whole, sharing):  # warm-up
        teacher.targets(small)
    prefix, tokens, seconds = sharing.prefix, [], {}
    assert prefix is not None
    for name, rollout in zip(("first", "later", "later"), given, strict=True):
        before = prefix.computed
        seconds[name] = read("shared", sharing, rollout)
        tokens.append(prefix.computed - before)
    seconds["whole"] = read("whole", whole, given[-1])
    gap = (outputs["shared"] - outputs["whole"]).norm() / outputs["whole"].norm()
    kept = len(prefix.kept) * cached_per_token(sharing.model.config) * args.dtype.itemsize
    return {
        "shared": shared,
        "placement": placement,
        "tokens": {"whole": sum(given[-1].sizes), "first": tokens[0], "later": tokens[-1]},
        "seconds": seconds,
        "distance": float(gap),
        "kept_bytes": kept,
    }


def main() -> None:
    args = options(
        __doc__, model="small", layers=4, shared=[200, 2000, 8000], gigabytes=4.0, dtype=torch.float32, device=device()
    )
    show([measure(args, shared, placement) for shared in args.shared for placement in ("none", "stream")], args.json)


if __name__ == "__main__":
    main()
