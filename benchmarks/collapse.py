"""Trains the students of the two built-in tasks, healthy and into a collapse, each with the guard that warns.

    python benchmarks/collapse.py --steps 40 --seeds 0 1 2

The tasks are those of `examples/quickstart.py` and `examples/self_distillation.py`, with fewer rows in a step. A
healthy run has to take all its steps; one with a rate a hundred times too high, or whose divergence is reversed, must
not. A clip leaves out the tokens that matter where the models are as far apart as here. "largest" is the largest median
of ten steps after the first ten, in nats and divided by the median of these (no less than 0.2 nats) and by the first
step, which the bounds of `docs/distributed.md` are held against.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from arithmetic import READER, STUDENT, TEACHER
from arithmetic.task import draw, prompts, prompts_with_solutions
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.describe import Banner
from trl_opsd.losses import Divergence
from trl_opsd.methods.collapse import COMPARED_STEPS, SMALL

ROWS = 16
"""Completions of a step."""
RATES = {"teacher": 1e-3, "self": 5e-3}
"""Of the examples."""
HEADER = f"{'task':8} {'run':22} seed  steps  first  median  last  largest  /median   /first  said"


@dataclass(frozen=True)
class Reversed(Divergence):
    """Moves the student away from its teacher."""

    def value(self, log_student: Any, log_teacher: Any) -> Any:
        return -(log_student.exp() * (log_student - log_teacher)).sum(-1)


def runs(task: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of each run, by name; the first two are healthy."""
    rate = RATES[task]
    yield "forward_kl", {"divergence": "forward_kl", "learning_rate": rate}
    yield "reverse_kl", {"divergence": "reverse_kl", "learning_rate": rate}
    yield "reverse_kl, clipped", {"divergence": "reverse_kl", "learning_rate": rate, "kl_clip": 0.05}
    yield "a rate x100", {"divergence": "reverse_kl", "learning_rate": 100 * rate}
    yield "a reversed divergence", {"divergence": Reversed(), "learning_rate": rate}


def trainer_of(task: str, seed: int, steps: int, folder: str, options: dict[str, Any]) -> OPSDTrainer:
    common = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": ROWS,
        "max_completion_length": 40,
        "top_p": 0.6,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "adam_beta2": 0.98,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        **options,
    }
    problems = draw(ROWS * steps, seed=seed)
    if task == "teacher":
        return OPSDTrainer(STUDENT, TEACHER, OPSDConfig(**common), prompts(problems))
    own = {"teacher_model_kind": "base", "teacher_prompt_template": "{prompt}{privileged_context}"}
    lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
    args = OPSDConfig(**common, **own)
    return OPSDTrainer(READER, None, args, prompts_with_solutions(problems), peft_config=lora)


class Said(logging.Handler):
    """Keeps what the guard has said of each figure."""

    def __init__(self) -> None:
        super().__init__()
        self.signs: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        start, _, sign = record.getMessage().partition(": ")
        if start.startswith("Sign of a collapse"):
            self.signs.append(re.split(r" \(|,", sign)[0])


def watched(task: str, seed: int, steps: int, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Trains once; the divergence of each step, and what the guard has said."""
    said = Said()
    guard = logging.getLogger("trl_opsd.methods.collapse")
    guard.addHandler(said)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(task, seed, steps, folder, options)
            for callback in (PrinterCallback, ProgressCallback, Banner):
                trainer.remove_callback(callback)
            trainer.train()
    finally:
        guard.removeHandler(said)
    return [row["divergence/mean"] for row in trainer.state.log_history if "divergence/mean" in row], said.signs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--runs", nargs="+", help="the first words of those to do; all by default")
    options = parser.parse_args()
    print(HEADER)
    for task in options.tasks:
        for name, chosen in runs(task):
            if options.runs and not name.startswith(tuple(options.runs)):
                continue
            for seed in options.seeds:
                each, signs = watched(task, seed, options.steps, chosen)
                later = [
                    abs(median(each[end - COMPARED_STEPS : end])) for end in range(2 * COMPARED_STEPS, len(each) + 1)
                ]
                first = median(each[:COMPARED_STEPS])
                largest = max(later, default=0.0)
                numbers = f"{each[0]:6.3f} {first:7.3f} {each[-1]:6.3f} {largest:8.3f}"
                ratios = f"{largest / max(abs(first), SMALL):8.2f} {largest / abs(each[0]):8.2f}"
                print(
                    f"{task:8} {name:22} {seed:4d} {len(each):6d} {numbers} {ratios}  {'; '.join(signs) or '-'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
