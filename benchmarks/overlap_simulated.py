"""Simulates steps whose rows are learned as they end, with the trainer's own rule of which rows are read when.

    python benchmarks/overlap_simulated.py
    python benchmarks/overlap_simulated.py --rows-at-once 1 8 16 32

Only the clock is simulated: rows end when their length says, each process has a [`Waiting`] of its own, as in
`loop/overlap.py`, and a round begins when every process has a micro-batch. Times are shares of the rollout of a step of
--batch rows, on a device apart; --processes processes teach and learn. Half of the rows have ended at 27 % of the
rollout and 90 % at 58 %, lengths are lognormal up to the longest allowed. Which share teaching and learning take is
what `CASES` says: it was solved from the seconds of a step in which they wait for the rollout, and of one in which only
the teacher does not, so those two columns are an input, and "all streamed" and "one step off" are what comes out.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from trl_opsd.loop.overlap import Waiting

PROMPT = 200
"""Tokens of a prompt."""
LONGEST = 4000
"""Tokens of the longest completion that is allowed."""
SIGMA = 0.6
"""Of the logarithm of a completion's tokens."""


@dataclass(frozen=True)
class Case:
    """Seconds of a teacher and of a student for all rows of a step, where the rollout takes one."""

    teach: float
    learn: float
    sigma: float = SIGMA

    @property
    def bound(self) -> float:
        return max(1.0, self.teach + self.learn)


CASES = {
    "7B student, 7B teacher": Case(teach=0.23, learn=0.43),
    "1.5B / 7B": Case(teach=0.44, learn=0.10),
    "1.5B / 32B": Case(teach=5.0, learn=0.55),
    "balanced": Case(teach=0.23, learn=0.75),
    "narrow lengths": Case(teach=0.24, learn=0.25, sigma=0.4),
}


def lengths(rows: int, sigma: float, seed: int) -> list[int]:
    """Of completions, in tokens: lognormal; 1.5 % would be longer than the longest allowed."""
    generator = random.Random(seed)
    median = LONGEST / math.exp(2.17 * SIGMA)
    return [max(1, min(LONGEST, round(median * math.exp(generator.gauss(0.0, sigma))))) for _ in range(rows)]


def ends(sizes: Sequence[int]) -> list[float]:
    """When each row has ended: all are written at once, the longest takes one second."""
    longest = max(sizes)
    return [size / longest for size in sizes]


def streamed(case: Case, sizes: list[int], processes: int, rows: int, budget: int | None = None) -> float:
    """Seconds of a step whose rows are taught and learned as they end, on one device for both."""
    shares = [list(range(first, len(sizes), processes)) for first in range(processes)]
    ended = ends(sizes)
    come = [sorted((ended[row], place) for place, row in enumerate(share)) for share in shares]
    waiting = [
        Waiting([PROMPT] * len(share), rows=rows, budget=budget, packed=True, multiple=1, in_order=False)
        for share in shares
    ]
    per_token = (case.teach + case.learn) * processes / (sum(sizes) + PROMPT * len(sizes))
    now = 0.0
    while any(one.left for one in waiting):
        begin, longest = now, 0.0
        for one, share, coming in zip(waiting, shares, come, strict=True):
            begin_here, taken = now, None
            while taken is None:
                while coming and coming[0][0] <= begin_here:
                    _, place = coming.pop(0)
                    one.add(place, [0] * sizes[share[place]])
                taken = one.take()
                if taken is None:
                    begin_here = coming[0][0]
            begin = max(begin, begin_here)
            longest = max(longest, per_token * sum(PROMPT + sizes[share[place]] for place in taken))
        now = begin + longest
    return now


def teacher_streamed(case: Case, sizes: list[int]) -> float:
    """Seconds of a step in which a teacher on the student's device reads rows as they end, and the student waits."""
    per_token = case.teach / (sum(sizes) + PROMPT * len(sizes))
    now = 0.0
    for end, size in sorted(zip(ends(sizes), sizes, strict=True)):
        now = max(now, end) + per_token * (PROMPT + size)
    return now + case.learn


def ratios(case: Case, asked: argparse.Namespace, rows: int, budget: int | None = None) -> list[float]:
    """Step / max(rollout, teach + learn): waits, teacher streamed, all streamed, one step off; means over the seeds."""
    found = []
    for seed in range(asked.seeds):
        sizes = lengths(asked.batch, case.sigma, seed)
        waits = 1.0 + case.teach + case.learn
        streams = streamed(case, sizes, asked.processes, rows, budget)
        found.append([waits, teacher_streamed(case, sizes), streams, case.bound])
    return [sum(column) / len(column) / case.bound for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="rows of a step")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rows-at-once", type=int, nargs="+", default=[1, 8, 16, 32], help="of all processes")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args()
    half, most = (sorted(ends(lengths(10_000, SIGMA, 0)))[place] for place in (5000, 9000))
    print(f"half of the rows have ended at {half:.0%} of the rollout, 90 % at {most:.0%}")
    by_rows = [f"all streamed, {rows} rows" for rows in asked.rows_at_once]
    names = ["waits", "teacher streamed", *by_rows, f"{asked.budget} tokens", "one step off"]
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for name, case in CASES.items():
        found = [ratios(case, asked, max(1, rows // asked.processes)) for rows in asked.rows_at_once]
        waits, teacher, _, ahead = found[0]
        budgeted = ratios(case, asked, 0, asked.budget)[2]
        values = [waits, teacher, *(one[2] for one in found), budgeted, ahead]
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")


if __name__ == "__main__":
    main()
