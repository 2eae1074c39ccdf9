"""Measures what learning from a part of the tokens saves: products with the heads, and seconds, of each criterion.

    python benchmarks/selection.py                             # the loss alone, and whole steps
    python benchmarks/selection.py --tokens 512 --steps 0      # only the loss

S is one product with the student's head, T one with the teacher's, of all tokens. The loss and its gradient are those
of a micro-batch from the last hidden states on; whole steps replay completions, so writing them is not in it. Times are
medians over interleaved repeats, relative to those of all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import timing
import torch
from common import device, options, qwen2, show
from datasets import Dataset
from support import tiny
from torch.utils.flop_counter import FlopCounterMode

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd.losses import OutputHead, ReverseKL
from trl_opsd.losses.objective import Objective
from trl_opsd.methods.selection import LATE, TokenSelection
from trl_opsd.teacher.comparison import Comparison, compared, tokens_by_teacher
from trl_opsd.types import Rollout, RowTargets, TeacherTargets

CRITERIA = (None, "prefix", "random", *LATE)
"""`None` learns from all tokens."""


class Batch:
    """Hidden states and heads of two random models, over rows of one length."""

    def __init__(self, args: argparse.Namespace, frozen: bool) -> None:
        torch.manual_seed(0)
        shape = args.rows, args.tokens // args.rows
        self.fraction, self.device = args.fraction, torch.device(args.device)
        self.hidden_BCH = torch.randn(*shape, args.student_width, device=self.device, requires_grad=True)
        self.head = self._head(args.vocab, args.student_width)
        self.head.weight.requires_grad_(not frozen)
        self.teacher_head = self._head(args.vocab, args.teacher_width)
        places = torch.arange(shape[1])
        states = torch.randn(*shape, args.teacher_width, device=self.device)
        self.targets = TeacherTargets.by_row([RowTargets(row, places) for row in states], shape[1])
        self.weights_BC = torch.ones(shape)
        ids_BC, ones_BC = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.long)
        self.rollout = Rollout(
            prompt_ids=ids_BC[:, :1],
            prompt_mask=ones_BC[:, :1],
            completion_ids=ids_BC,
            completion_mask=ones_BC,
            weights=self.weights_BC,
        )

    def _head(self, vocabulary: int, width: int) -> OutputHead:
        return OutputHead(torch.randn(vocabulary, width, device=self.device).mul_(3 / width**0.5))

    def learn(self, criterion: str | None) -> None:
        """The loss and its gradient, as a micro-batch has it."""
        weights_BC, late = self.weights_BC, None
        if criterion is not None:
            selection = TokenSelection(criterion, self.fraction)
            late = selection if selection.by_token else None
            seeds = range(len(weights_BC))
            weights_BC = selection.thinned(weights_BC) if late else selection.chosen(weights_BC, seeds)
        heads = [self.teacher_head]
        shares = tokens_by_teacher(heads, self.targets, weights_BC, late)
        comparison = Comparison(self.rollout, self.targets, shares, self.hidden_BCH)
        parts = compared(comparison, self.head, heads, None, Objective(divergence=ReverseKL(), selection=late))
        wanted = [one for one in (self.hidden_BCH, self.head.weight) if one.requires_grad]
        torch.autograd.grad(parts.loss, wanted)


def flops(run: Callable[[], Any]) -> int:
    """FLOPs of the products, with those that the counter omits (addmm_) or cannot parse (out_dtype=)."""

    def product(_: Any, a: Any, b: Any, *__: Any, **___: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    mapping = {torch.ops.aten.addmm_: product, torch.ops.aten.addmm: product}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return int(counter.get_total_flops())


def of_loss(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The loss alone, with a head that is trained and with one that is not."""
    rows = []
    for frozen in (False, True):
        batch = Batch(args, frozen)
        counted = {one: flops(partial(batch.learn, one)) for one in CRITERIA}
        learning = {one: partial(batch.learn, one) for one in CRITERIA}
        seconds = timing.in_turns(learning, batch.device, args.repeats)
        what = "head frozen" if frozen else "head trained"
        rows += [row(f"loss, {what}", one, seconds, flops=counted[one] / counted[None]) for one in CRITERIA]
    return rows


def row(what: str, criterion: str | None, seconds: dict[Any, list[float]], **more: Any) -> dict[str, Any]:
    relative = timing.ratio(seconds[criterion], seconds[None])
    return {
        "what": what,
        "criterion": criterion or "all tokens",
        **more,
        "seconds": statistics.median(seconds[criterion]),
        "relative": relative,
    }


# ---- Whole steps ----------------------------------------------------------------------------------------------------


def of_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole optimizer steps on replayed completions, by `step_time` of TRL's log."""
    seconds: dict[str | None, list[float]] = {one: [] for one in CRITERIA}
    for _ in range(args.step_repeats):
        for one in CRITERIA:
            seconds[one] += step_times(args, one)
    return [row("whole step", one, seconds) for one in CRITERIA]


def step_times(args: argparse.Namespace, criterion: str | None) -> list[float]:
    """Seconds of each step but the first."""
    generator, words = torch.Generator().manual_seed(0), tiny.tokenizer()
    length, number = args.tokens // args.rows, args.rows * (args.steps + 1)
    prompts = [f"{row:0{args.prompt_tokens}}" for row in range(number)]
    drawn = torch.randint(3, args.vocab, (number, length), generator=generator).tolist()
    written = dict(zip(map(tuple, words(prompts)["input_ids"]), drawn, strict=True))
    student, teacher = (
        qwen2(width, args.layers, args.vocab, heads=width // 32, seed=seed)
        for seed, width in enumerate((args.student_width, args.teacher_width))
    )
    with tempfile.TemporaryDirectory() as folder:
        config = tiny.config(
            folder,
            per_device_train_batch_size=args.rows,
            max_steps=args.steps + 1,
            max_completion_length=length,
            use_cpu=torch.device(args.device).type == "cpu",
            methods=criterion and {"token_selection": {"criterion": criterion, "fraction": args.fraction}},
        )
        rows = Dataset.from_dict({"prompt": prompts})
        given = {"processing_class": words, "rollout": FixedRollout(written)}
        trainer = OPSDTrainer(student, teacher, config, rows, **given)
        trainer.train()
    return tiny.logged(trainer, "step_time")[1:]


def main() -> None:
    args = options(
        __doc__,
        fraction=0.3,
        rows=4,
        tokens=512,
        prompt_tokens=32,
        vocab=32000,
        student_width=512,
        teacher_width=512,
        layers=4,
        repeats=5,
        steps=4,
        step_repeats=3,
        device=device(),
    )
    show(of_loss(args) + (of_steps(args) if args.steps else []), args.json)


if __name__ == "__main__":
    main()
