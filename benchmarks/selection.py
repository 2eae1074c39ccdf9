"""Measures what learning from a part of the tokens saves: products with the heads, and seconds, of each criterion.

    python benchmarks/selection.py                             # the loss alone, and whole steps
    python benchmarks/selection.py --tokens 512 --steps 0      # only the loss

S is one product with the student's head, T one with the teacher's, of all tokens. The loss and its gradient are those
of a micro-batch from the last hidden states on; whole steps replay completions, so writing them is not in it. Times are
medians over interleaved repeats, relative to those of all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import timing
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.losses import OutputHead, ReverseKL
from trl_opsd.losses.objective import Objective
from trl_opsd.losses.token_selection import EARLY, LATE, Selection
from trl_opsd.teacher.comparison import compared, tokens_by_teacher
from trl_opsd.types import Rollout, RowTargets, TeacherTargets

CRITERIA = (None, *EARLY, *LATE)
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
            selection = Selection(criterion, self.fraction)
            late = selection if selection.is_late else None
            seeds = range(len(weights_BC))
            weights_BC = selection.thinned(weights_BC) if late else selection.chosen(weights_BC, seeds)
        heads = [self.teacher_head]
        parts = compared(
            self.hidden_BCH,
            self.head,
            heads,
            tokens_by_teacher(heads, self.targets, weights_BC, late),
            self.rollout,
            None,
            Objective(divergence=ReverseKL(), selection=late),
        )
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
        seconds: dict[str | None, list[float]] = {one: [] for one in CRITERIA}
        for repeat in range(args.repeats + 1):
            for one in CRITERIA:
                taken = timing.once(partial(batch.learn, one), batch.device)
                seconds[one] += [taken] if repeat else []
        what = "head frozen" if frozen else "head trained"
        rows += [row(f"loss, {what}", one, seconds, flops=counted[one] / counted[None]) for one in CRITERIA]
    return rows


def row(what: str, criterion: str | None, seconds: dict[Any, list[float]], **more: Any) -> dict[str, Any]:
    relative = [mine / all_ for mine, all_ in zip(seconds[criterion], seconds[None], strict=True)]
    return {
        "what": what,
        "criterion": criterion or "all tokens",
        **more,
        "seconds": statistics.median(seconds[criterion]),
        "relative": statistics.median(relative),
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
    generator = torch.Generator().manual_seed(0)
    words = tokenizer(args.vocab)
    length = args.tokens // args.rows
    number = args.rows * (args.steps + 1)
    drawn = torch.randint(3, args.vocab, (number, args.prompt_tokens + length), generator=generator).tolist()
    prompts = [" ".join(map(str, ids[: args.prompt_tokens])) for ids in drawn]
    written = {tuple(ids[: args.prompt_tokens]): ids[args.prompt_tokens :] for ids in drawn}
    with tempfile.TemporaryDirectory() as folder:
        trainer = OPSDTrainer(
            model(args, args.student_width, 0),
            model(args, args.teacher_width, 1),
            OPSDConfig(
                folder,
                per_device_train_batch_size=args.rows,
                max_steps=args.steps + 1,
                max_completion_length=length,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                bf16=False,
                use_cpu=args.device == "cpu",
                gradient_checkpointing=False,
                methods=criterion and {"token_selection": {"criterion": criterion, "fraction": args.fraction}},
            ),
            Dataset.from_dict({"prompt": prompts}),
            processing_class=words,
            rollout=FixedRollout(written),
        )
        trainer.train()
    return [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry][1:]


def model(args: argparse.Namespace, width: int, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=args.layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    return Qwen2ForCausalLM(config)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Each number is a word."""
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, **{str(number): number for number in range(3, vocabulary)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':20}{'':20}{'head FLOPs':>12}{'seconds':>10}{'relative':>10}"]
    for one in rows:
        counted = f"{one['flops']:.3f}" if "flops" in one else ""
        lines.append(f"{one['what']:20}{one['criterion']:20}{counted:>12}{one['seconds']:10.3f}{one['relative']:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fraction", type=float, default=0.3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of all completions")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--student-width", type=int, default=512)
    parser.add_argument("--teacher-width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="whole steps of a training; 0 for none")
    parser.add_argument("--step-repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    args = parser.parse_args()
    rows = of_loss(args) + (of_steps(args) if args.steps else [])
    print(json.dumps(rows, indent=2) if args.json else table(rows))


if __name__ == "__main__":
    main()
