"""Measures whole optimizer steps beside `trl.DistillationTrainer`'s, on the same completions, by phase.

    python benchmarks/end_to_end.py                                                      # on any device
    python benchmarks/end_to_end.py --lengths ragged --option padding_free=True          # an option of ours
    python benchmarks/end_to_end.py --common bf16=True --tolerance 0.01                  # an option of both
    python benchmarks/end_to_end.py --student PATH --teacher PATH                        # models of your own

Each training runs in a process of its own, TRL's and ours in turns, and begins with a step that does not count. Times
are medians over steps and repeats: processor seconds, which other programs on the machine hardly change, and seconds by
the wall clock. Tokens that enter a model, padding included, are counted per real token of prompts and completions; so
are those of the loss. Both trainers must log the same losses, so that the work is the
same. Lengths are lognormal ("ragged") or equal ("even") at about as many tokens; --micro is rows of a micro-batch x
micro-batches; completions are "recorded", or "written" with transformers by each trainer (--rollouts).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from common import device, options, qwen2, settled, show
from datasets import Dataset
from peft import LoraConfig
from support import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer
from trl_opsd.loop.step_stats import PhaseClock
from trl_opsd.models.backbone import backbone_of

ROOT = Path(__file__).resolve().parents[1]
PHASES = {
    "write": "completions",
    "teach": "the teacher's forward passes",
    "forward": "the student's",
    "loss": "from hidden states to the loss; ours forms its gradient there",
    "backward": "the backward pass",
    "optimizer": "the optimizer's step",
    "other": "all else",
}
BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
SIDES = ("trl", "ours")
CASE = ("micro", "tuning", "divergence", "rollouts", "lengths")
"""What a case consists of; each is an option with several values."""


# ---- One training, in a process of its own -----------------------------------------------------------------------


class Meter:
    """Seconds of each phase, without those of phases inside it, and tokens through each backbone."""

    def __init__(self) -> None:
        self.wall, self.processor = PhaseClock(now=settled), PhaseClock(now=partial(settled, process_time))
        self.tokens: Counter[str] = Counter()
        self.steps: list[dict[str, Any]] = []
        self._before: dict[str, Any] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with self.wall(phase), self.processor(phase):
            yield

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            with self(phase):
                return function(*given, **named)

        return call

    def watch(self, model: Any, name: str, phase: str) -> None:
        """Times a model's backbone, and counts the tokens that enter it, padding included."""

        def count(module: Any, given: Any, embedded: Any) -> None:
            self.tokens[name] += embedded.shape[:-1].numel()

        backbone = backbone_of(model)
        backbone.forward = self.timed(phase, backbone.forward)
        model.get_input_embeddings().register_forward_hook(count)

    def step_ends(self) -> None:
        """Takes what was measured since the last call."""
        now = {
            "wall": dict(self.wall.seconds),
            "processor": dict(self.processor.seconds),
            "tokens": dict(self.tokens),
            "total": {"wall": perf_counter(), "processor": process_time()},
        }
        if before := self._before:
            step = {kind: {name: of[name] - before[kind].get(name, 0) for name in of} for kind, of in now.items()}
            for kind in ("wall", "processor"):
                step[kind]["other"] = step["total"][kind] - sum(step[kind].values())
            self.steps.append(step)
        self._before = now


def trainer_class(side: str, meter: Meter, recorded: dict[tuple[int, ...], list[int]] | None) -> type:
    """TRL's trainer or ours, with its phases timed; TRL's replays recorded completions."""

    class Timed(OPSDTrainer if side == "ours" else DistillationTrainer):  # type: ignore[misc]
        pass

    verb = "complete" if side == "ours" else "_generate_single_turn"

    def write(self: Any, prompt_ids: Any, *given: Any) -> Any:
        before = meter.tokens.copy()
        with meter("write"):
            if side == "trl" and recorded:
                written = FixedRollout(recorded).complete(prompt_ids, 0)
            else:
                written = getattr(super(Timed, self), verb)(prompt_ids, *given)
        meter.tokens.clear()  # those of decoding do not count
        completion = sum(map(len, written))
        meter.tokens.update(before, loss=completion, real=completion + sum(map(len, prompt_ids)))
        return written

    setattr(Timed, verb, write)
    if side == "ours":  # in its own method: reading prompts, checks and copies too
        Timed.teach = meter.timed("teach", Timed.teach)  # type: ignore[attr-defined]
    return Timed


def make_model(args: argparse.Namespace, which: str) -> Any:
    if path := getattr(args, which):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    width = args.width if which == "student" else 2 * args.width
    heads = {"heads": max(width // 64, 1), "num_key_value_heads": max(width // 128, 1)}
    return qwen2(width, args.layers, args.vocab, seed=int(which == "teacher"), tie_word_embeddings=True, **heads)


def lengths(kind: str, mean: int, rows: int, generator: torch.Generator | None) -> list[int]:
    """Lengths of a mean of about `mean` and, if ragged, a standard deviation of about as much."""
    if kind == "even":
        return [mean] * rows
    drawn = torch.empty(rows).log_normal_(mean=-0.35, std=0.83, generator=generator)
    found: list[int] = drawn.mul_(mean).clamp_(2, 8 * mean).int().tolist()
    return found


def make_rows(args: argparse.Namespace, kind: str, rows: int, tokenizer: Any) -> tuple[list[str], dict[Any, list[int]]]:
    """Prompts out of a text, and a random completion for each, by the ids that the tokenizer gives the prompt."""
    generator = torch.Generator().manual_seed(0)
    text = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    wanted = lengths(kind, args.prompt_tokens, rows, generator)
    starts = torch.randperm(len(text) - max(wanted), generator=generator)[:rows].tolist()
    prompts = [tokenizer.decode(text[start : start + n]) for start, n in zip(starts, wanted, strict=True)]
    vocabulary = len(tokenizer) if args.student else args.vocab
    completions = [
        torch.randint(3, vocabulary, (n,), generator=generator).tolist()
        for n in lengths(kind, args.tokens, rows, generator)
    ]
    keys = [tuple(ids) for ids in tokenizer(prompts)["input_ids"]]
    return prompts, dict(zip(keys, completions, strict=True))


def train(side: str, case: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    """Trains for a few steps in this process, and says what each cost."""
    rows, accumulation = map(int, case["micro"].split("x"))
    tokenizer = AutoTokenizer.from_pretrained(args.student) if args.student else tiny.tokenizer()
    prompts, completions = make_rows(args, case["lengths"], rows * accumulation * (args.steps + 1), tokenizer)
    recorded = completions if case["rollouts"] == "recorded" else None
    meter = Meter()
    peaks: dict[str, int] = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            optimizer.step = meter.timed("optimizer", optimizer.step)
            Path("/proc/self/clear_refs").write_text("5")  # a new peak

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.step_ends()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            cuda = torch.cuda.is_available() and not args.use_cpu
            peaks["peak"] = torch.cuda.max_memory_allocated() if cuda else resident_peak()

    with tempfile.TemporaryDirectory() as folder:
        given = tiny.options(
            folder,
            beta=BETAS[case["divergence"]],
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=args.steps + 1,
            max_completion_length=max(map(len, completions.values())) if recorded else args.tokens,
            learning_rate=1e-5,
            use_cpu=args.device == "cpu",
        )
        given |= parsed(args.common) | (parsed(args.option) if side == "ours" else {})
        models = make_model(args, "student"), make_model(args, "teacher")
        trainer = trainer_class(side, meter, recorded)(
            *models,
            args=(OPSDConfig if side == "ours" else DistillationConfig)(**given),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, target_modules="all-linear") if case["tuning"] == "lora" else None,
            callbacks=[Watch()],
            **({"rollout": FixedRollout(recorded)} if side == "ours" and recorded else {}),
        )
        loss = "_compared" if side == "ours" else "_compute_loss"
        setattr(trainer, loss, meter.timed("loss", getattr(trainer, loss)))
        trainer.accelerator.backward = meter.timed("backward", trainer.accelerator.backward)
        meter.watch(trainer.accelerator.unwrap_model(trainer.model), "student", "forward")
        meter.watch(trainer.accelerator.unwrap_model(trainer.teacher_model), "teacher", "teach")
        trainer.train()
    return {"side": side, **case, "steps": meter.steps, "losses": tiny.logged(trainer, "loss"), **peaks}


def resident_peak() -> int:
    """The largest resident size of this process, in bytes; `getrusage` would have that of its parent as well."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def parsed(options: list[str]) -> dict[str, Any]:
    """Options given as `name=value`; a value that is no literal of Python is text."""

    def value(text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text

    return {name: value(text) for name, _, text in (option.partition("=") for option in options) if name}


# ---- All of them ----------------------------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    for values in itertools.product(*(getattr(args, name) for name in CASE)):
        yield dict(zip(CASE, values, strict=True))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for case in cases(args):
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for side in SIDES * args.repeats:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                runs[side].append(process.submit(train, side, case, args).result())
        found += summed_up(runs, args.tolerance)
    return found


def summed_up(runs: dict[str, list[dict[str, Any]]], tolerance: float) -> list[dict[str, Any]]:
    """One row for each side of a case: medians over steps and repeats, peaks, and the ratios to TRL's.

    Raises:
        ValueError: The two sides did not log the same losses.
    """
    each = {side: [loss for run in of for loss in run["losses"]] for side, of in runs.items()}
    gap = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(each["trl"], each["ours"], strict=True))
    if not gap <= tolerance:
        raise ValueError(f"The losses differ by {gap:.1e} ({each}), more than {tolerance}: the work is not the same.")
    totals = {
        side: {kind: [_median(step["total"][kind] for step in run["steps"]) for run in of] for kind in _KINDS}
        for side, of in runs.items()
    }
    rows = []
    for side, of in runs.items():
        steps = [step for run in of for step in run["steps"]]
        tokens = sum((Counter(step["tokens"]) for step in steps), Counter())
        row = {name: of[0][name] for name in ("side", *CASE)}
        row |= {"loss_gap": gap, "peak": max(run["peak"] for run in of)}
        row |= {f"{name}_tokens": tokens[name] / tokens["real"] for name in ("student", "teacher")}
        row |= {"loss_tokens": tokens["loss"] / tokens["real"]}
        for kind in _KINDS:
            pairs = zip(totals["trl"][kind], totals[side][kind], strict=True)
            row[kind] = {name: _median(step[kind].get(name, 0.0) for step in steps) for name in PHASES}
            row[kind] |= {"total": _median(totals[side][kind]), "over_trl": _median(trl / own for trl, own in pairs)}
        rows.append(row)
    return rows


_KINDS = ("processor", "wall")
_median = statistics.median


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    return options(
        __doc__,
        given,
        lengths=["ragged", "even"],
        tuning=["full", "lora"],
        divergence=["reverse_kl", "jsd"],
        micro=["2x8", "4x4"],
        rollouts=["recorded"],
        option=[""],
        common=[""],
        student="",
        teacher="",
        prompt_tokens=48,
        tokens=64,
        width=256,
        layers=8,
        vocab=32000,
        device=device().type,
        steps=3,
        repeats=3,
        tolerance=1e-5,
    )


def main() -> None:
    args = arguments()
    show(measure(args), args.json)


if __name__ == "__main__":
    main()
