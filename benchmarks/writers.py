"""Who writes the completions of a student that starts at nothing: accuracy after equal steps, and what each way costs.

    python benchmarks/writers.py --output out/writers

The adder of `examples/arithmetic` is to subtract, which it never does right, and learns of the teacher of that task.
Every run has the same optimizer, schedule, problems and number of completions. Results are kept in the output folder.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from arithmetic import ADDER, TEACHER
from arithmetic.evaluate import accuracy, answers
from arithmetic.task import Problem, draw, prompts

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.methods import Blend, Speculative

BATCH = 32
"""Completions in an optimizer step."""
LENGTH = 40
"""Most tokens of a completion."""


class Tokens(TrainerCallback):
    """Sums what a run logs of the tokens in its loss by author, and of what its teacher reads to write them."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        for name, value in logs.items():
            if name.startswith(("tokens/", "together/", "time/complete")):
                self.sums[name] = self.sums.get(name, 0.0) + value


def subtractions(number: int, seed: int = 0, held_out: bool = False) -> list[Problem]:
    return [one for one in draw(3 * number, seed=seed, held_out=held_out) if one.sign == "-"][:number]


def samples(problems: list[Problem], seed: int) -> list[list[int]]:
    """What the teacher writes for each problem."""
    torch.manual_seed(seed)
    return answers(
        AutoModelForCausalLM.from_pretrained(TEACHER), AutoTokenizer.from_pretrained(TEACHER), problems, temperature=1.0
    )


class Run:
    """The trainings of one seed, of one student."""

    def __init__(self, seed: int, asked: argparse.Namespace) -> None:
        self.seed, self.asked = seed, asked
        torch.manual_seed(seed)
        self.model, self.words = AutoModelForCausalLM.from_pretrained(ADDER), AutoTokenizer.from_pretrained(ADDER)
        self.tokens = Tokens()

    def problems(self, steps: int, first: int = 0) -> list[Problem]:
        return subtractions(BATCH * (first + steps), 1000 + self.seed)[BATCH * first :]

    def options(self, steps: int) -> dict[str, Any]:
        return {
            "output_dir": str(self.asked.output / "scratch"), "max_steps": steps, "per_device_train_batch_size": BATCH,
            "learning_rate": self.asked.learning_rate, "adam_beta2": 0.98, "warmup_steps": 10, "seed": self.seed,
            "lr_scheduler_type": "constant_with_warmup", "logging_steps": 1, "bf16": False, "report_to": "none",
            "dataloader_pin_memory": False, "gradient_checkpointing": False, "save_strategy": "no",
            "disable_tqdm": True,
        }  # fmt: skip

    def distil(self, steps: int, rows: Dataset, methods: tuple[Any, ...] = (), **options: Any) -> None:
        args = OPSDConfig(
            divergence=self.asked.divergence, max_completion_length=LENGTH, **{**self.options(steps), **options}
        )
        trainer = OPSDTrainer(
            model=self.model, teacher_model=TEACHER, args=args, train_dataset=rows, processing_class=self.words,
            callbacks=[self.tokens], methods=list(methods),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    def supervise(self, steps: int) -> None:
        problems = self.problems(steps)
        texts = self.words.batch_decode(samples(problems, self.seed), skip_special_tokens=True)
        rows = {
            "prompt": [one.prompt for one in problems],
            "completion": [[{"role": "assistant", "content": one}] for one in texts],
        }
        trainer = SFTTrainer(
            model=self.model, args=SFTConfig(**self.options(steps)), train_dataset=Dataset.from_dict(rows),
            processing_class=self.words,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    # ---- Ways to write ------------------------------------------------------------------------------------------

    def alone(self, steps: int) -> None:
        self.distil(steps, prompts(self.problems(steps)))

    def on_samples(self, steps: int) -> None:
        self.distil(steps, prompts(self.problems(steps)), seq_kd=True, lmbda=0.0)

    def samples_first(self, steps: int) -> None:
        self.on_samples(steps // 2)
        self.distil(steps - steps // 2, prompts(self.problems(steps - steps // 2, steps // 2)))

    def supervised_first(self, steps: int) -> None:
        self.supervise(steps // 2)
        self.distil(steps - steps // 2, prompts(self.problems(steps - steps // 2, steps // 2)))

    def prefixes(self, steps: int) -> None:
        """The teacher's samples, each cut where the student goes on: later in the training earlier."""
        problems, draws = self.problems(steps), random.Random(self.seed)
        begun = []
        for number, ids in enumerate(samples(problems, self.seed)):
            left = 1 - number / len(problems)
            cut = int(draws.uniform(0, min(1.0, 2 * left)) * (len(ids) - 1))
            begun.append(self.words.decode(ids[:cut]) or None)
        rows = prompts(problems).add_column("completion_prefix", begun)
        self.distil(steps, rows, shuffle_dataset=False)

    def blended(self, steps: int) -> None:
        self.distil(steps, prompts(self.problems(steps)), (Blend(teacher=0.5, until_step=steps // 2),))

    def speculative(self, steps: int) -> None:
        self.distil(steps, prompts(self.problems(steps)), (Speculative(top_k=self.asked.top_k, until_step=steps // 2),))


WAYS: dict[str, Callable[[Run, int], None]] = {
    "the student alone": Run.alone,
    "supervised, the teacher's samples": Run.supervise,
    "supervised, then the student alone": Run.supervised_first,
    "the teacher alone": Run.on_samples,
    "the teacher, then the student alone": Run.samples_first,
    "the teacher's beginnings, shorter and shorter": Run.prefixes,
    "blended, then the student alone": Run.blended,
    "speculative, then the student alone": Run.speculative,
}


def result(way: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One training, from the output folder if it is there."""
    words = "-".join("".join(one if one.isalpha() else " " for one in way).split())
    path = asked.output / f"{words}-{asked.divergence}-{asked.steps}-{asked.learning_rate:g}-seed{seed}.json"
    if not path.exists():
        held_out, run, start = subtractions(asked.held_out, held_out=True), Run(seed, asked), time.perf_counter()
        before = accuracy(run.model, run.words, held_out)
        WAYS[way](run, asked.steps)
        seconds = time.perf_counter() - start
        model = run.model
        figures = {"before": before, "greedy": accuracy(model, run.words, held_out), "seconds": seconds}
        figures["sampled"] = accuracy(model, run.words, held_out, temperature=1.0)
        asked.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"way": way, "seed": seed, **figures, **run.tokens.sums}) + "\n", encoding="utf-8")
        print(f"{way}, seed {seed}: {figures['greedy']:.3f} in {seconds:.0f} s", flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/writers"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--divergence", default="forward_kl")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    found = [result(way, seed, asked) for seed in asked.seeds for way in asked.ways]
    print("| who writes | greedy | sampled | seconds |\n|---|---|---|---|")
    for way in asked.ways:
        runs = [one for one in found if one["way"] == way]
        cells = (
            f"{sum(values) / len(values):.3f} ({min(values):.3f} – {max(values):.3f})"
            for values in ([one[name] for one in runs] for name in ("greedy", "sampled"))
        )
        print(f"| {way} | {' | '.join(cells)} | {sum(one['seconds'] for one in runs) / len(runs):.0f} |")


if __name__ == "__main__":
    main()
