"""Measures what the figures of a loss cost that depend on places and ranks, of tokens and within a completion.

    python benchmarks/figures.py --repeats 12

A micro-batch of a random student is read, compared with a teacher and propagated back, in turn with those figures and
without them. The ratio is that of two runs after each other; its median and its quartiles are printed for each shape,
and beside it the share of such a run that they take when they are computed alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support import tiny
from timing import once

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.losses import reduce, streamed
from trl_opsd.losses.elementwise import looked_at, top_shared_
from trl_opsd.teacher import comparison

SHAPES = [(4, 128, 8192), (8, 256, 8192), (4, 512, 32768)]
"""Rows, completion tokens, and tokens of the vocabulary."""
WIDTH = 128
PROMPT = 16


def trainer_of(folder: str, vocabulary: int, tokens: int) -> OPSDTrainer:
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": PROMPT + tokens}
    args = OPSDConfig(**tiny.options(folder, max_completion_length=tokens))
    return OPSDTrainer(
        tiny.qwen2(WIDTH, seed=0, **sizes),
        tiny.qwen2(WIDTH, seed=1, **sizes),
        args,
        tiny.rows(),
        processing_class=tiny.tokenizer(),
        rollout=FixedRollout({}),
    )


def measured(rows: int, tokens: int, vocabulary: int, repeats: int) -> tuple[list[float], float]:
    """The ratios of seconds with the figures and without, and the share of the figures alone."""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, vocabulary, tokens)
    student = trainer.model.train()
    ids = torch.randint(3, vocabulary, (rows, PROMPT + tokens), generator=torch.Generator().manual_seed(0))
    rollout = tiny.rollout(ids[:, :PROMPT], ids[:, PROMPT:], torch.ones_like(ids[:, PROMPT:]))
    targets = trainer.teacher.targets(rollout)
    kept = []

    def all_of_it() -> None:
        trainer.compare(student, rollout, targets, None).loss.backward()

    def without(per_token, weights, num_items, real):
        kept[:] = [per_token, weights, num_items, real]
        return reduce(per_token, weights, num_items)

    def pair() -> float:
        with_figures = once(all_of_it, cpu)
        comparison.reduce, streamed.looked_at = without, lambda tokens, rows: slice(0, 0)
        try:
            return with_figures / once(all_of_it, cpu)
        finally:
            comparison.reduce, streamed.looked_at = reduce, looked_at

    ratios = [pair() for _ in range(repeats + 1)][1:]
    per_token, weights, num_items, real = kept
    ranked = torch.randn(2, len(per_token.divergence), vocabulary)[:, looked_at(rows * tokens, slice(0, rows * tokens))]
    alone = [
        once(lambda: top_shared_(ranked.clone()), cpu)
        + once(lambda: reduce(per_token, weights, num_items, real), cpu)
        - once(lambda: reduce(per_token, weights, num_items), cpu)
        for _ in range(repeats)
    ]
    return ratios, median(alone) / median(once(all_of_it, cpu) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12)
    options = parser.parse_args()
    print("rows  tokens  vocabulary  ratio (quartiles)    alone")
    for rows, tokens, vocabulary in SHAPES:
        ratios, share = measured(rows, tokens, vocabulary, options.repeats)
        low, middle, high = quantiles(ratios)
        print(
            f"{rows:4d}  {tokens:6d}  {vocabulary:10d}  {middle:.3f} ({low:.3f}-{high:.3f})  {share:6.2%}", flush=True
        )


if __name__ == "__main__":
    main()
