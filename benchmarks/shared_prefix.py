"""Measures a teacher whose rows share a prefix: tokens and seconds of a step, beside whole rows.

    python benchmarks/shared_prefix.py                                     # a small model, on any device
    python benchmarks/shared_prefix.py --model 7B --dtype bfloat16 --layers 0 --shared 2000

Each of 8 rows has 50 to 200 tokens of its own after the shared ones. "first" is the step that reads the prefix, "later"
one that has it kept. Models are those of `teacher.py`; the rows of a step differ from those of the step before.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch
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


def line(found: dict[str, Any]) -> str:
    tokens, seconds = found["tokens"], found["seconds"]
    each = "".join(f"{tokens[name]:9}{seconds[name]:8.3f}" for name in ("whole", "first", "later"))
    ratio = seconds["whole"] / seconds["later"]
    ends = f"{ratio:7.1f}x{found['kept_bytes'] / 1e6:9.1f}  {found['distance']:.1e}"
    return f"{found['shared']:6}  {found['placement']:7}{each}{ends}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=4, help="layers; 0 for the model's own number")
    parser.add_argument("--shared", type=int, nargs="+", default=[200, 2000, 8000], help="tokens that all rows share")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="limit of what is kept")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32, metavar="float32")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", type=torch.device, default=accelerator or torch.device("cpu"))
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    args = parser.parse_args()
    if not args.json:
        heads = "".join(f"{f'{name}: tok':>9}{'s':>8}" for name in ("whole", "first", "later"))
        print(f"{'shared':6}  {'kept':7}{heads}{'faster':>8}{'MB':>9}  distance")
    results = []
    for shared in args.shared:
        for placement in ("none", "stream"):
            results.append(measure(args, shared, placement))
            if not args.json:
                print(line(results[-1]), flush=True)
    if args.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
