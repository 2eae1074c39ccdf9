"""Trains on both tasks of the examples with each objective, for equally many tokens, and tabulates what was learned.

    python benchmarks/objectives.py --tokens 150000 --seeds 0 1 2 --output out/objectives.jsonl

A line of the output is one training: it is appended when that has ended, and what it holds is not trained again.
Accuracy is greedy, on held-out problems. Tokens are those that the student has written, in each training.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from arithmetic import READER, STUDENT, TEACHER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts, prompts_with_solutions
from common import options, read, studied, summary
from divergences import AdaptiveKL, AlphaDivergence
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.report.describe import Banner

ROWS = 64
"""Completions of a step, as in the examples."""
PROBLEMS = 200
"""Held-out problems: with so many, an accuracy of 0.5 is known to 0.035."""
LONGEST = 40
"""Most tokens of a completion."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd": {"divergence": "jsd"},
    "skewed_forward_kl": {"divergence": "skewed_forward_kl"},
    "skewed_reverse_kl": {"divergence": "skewed_reverse_kl"},
    "skewed_reverse_kl, skew 0.5": {"divergence": {"skewed_reverse_kl": {"skew": 0.5}}},
    "total_variation": {"divergence": "total_variation"},
    "alpha_divergence": {"divergence": AlphaDivergence()},
    "adaptive_kl": {"divergence": AdaptiveKL()},
    "forward_kl, clipped at 0.05": {"divergence": "forward_kl", "kl_clip": 0.05},
    "reverse_kl, clipped at 0.05": {"divergence": "reverse_kl", "kl_clip": 0.05},
    "forward_kl, clipped at 0.5": {"divergence": "forward_kl", "kl_clip": 0.5},
    "jsd, clipped at 0.05": {"divergence": "jsd", "kl_clip": 0.05},
    "forward_kl, teacher at 0.5": {"divergence": "forward_kl", "teacher_temperature": 0.5},
    "forward_kl, teacher at 2": {"divergence": "forward_kl", "teacher_temperature": 2.0},
    "forward_kl, both at 2": {"divergence": "forward_kl", "teacher_temperature": 2.0, "student_temperature": 2.0},
    "forward_kl, teacher's top 2": {"divergence": "forward_kl", "top_k_teacher": 2},
    **{
        f"forward_kl, 0.3 by {name}": {
            "divergence": "forward_kl",
            "methods": {"token_selection": {"criterion": name, "fraction": 0.3}},
        }
        for name in ("prefix", "random", "student_entropy", "teacher_divergence")
    },
    "reverse_kl, whole samples": {"divergence": "reverse_kl", "top_p": 1.0},
    "sampled_reverse_kl": {"divergence": "sampled_reverse_kl", "top_p": 1.0},
}
"""What is compared: the options that each sets. The last two are a pair, as a policy gradient needs all of `top_p`."""

TASKS = ("arithmetic", "self")
"""A larger teacher; and a student that is its own teacher, which also reads the solution."""
SELF_TAUGHT = {"teacher_model_kind": "base", "teacher_prompt_template": "{prompt}{privileged_context}"}
COMMON: dict[str, Any] = {
    "max_completion_length": LONGEST,
    "top_p": 0.6,
    "warmup_steps": 10,
    "adam_beta2": 0.98,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Options of every training."""


class Budget(TrainerCallback):
    """Ends a training when the student has written as many tokens; keeps what was logged of each step."""

    def __init__(self, tokens: int) -> None:
        self.left, self.written = tokens, 0
        self.loss: list[float] = []
        self.entropy: list[float] = []

    def on_log(self, args: Any, state: Any, control: TrainerControl, logs: Mapping[str, float], **_: Any) -> None:
        if "loss" in logs:
            self.loss.append(logs["loss"])
            self.entropy.append(logs.get("entropy/student", math.nan))  # of no token where no row counts
            self.written += round(logs["completions/mean_length"] * args.train_batch_size)
            control.should_training_stop |= self.written >= self.left


def trained(task: str, given: Mapping[str, Any], seed: int, tokens: int) -> dict[str, Any]:
    """Trains once; what was learned, and the loss of each step."""
    arithmetic = task == "arithmetic"
    with tempfile.TemporaryDirectory() as folder:
        args = OPSDConfig(
            folder,
            **{
                **COMMON,
                "max_steps": 2 * tokens // ROWS,  # never reached: a completion has several tokens
                "per_device_train_batch_size": ROWS,
                "learning_rate": 1e-3 if arithmetic else 5e-3,
                "lr_scheduler_type": "constant_with_warmup",
                "seed": seed,
                **({} if arithmetic else SELF_TAUGHT),
                **given,
            },
        )
        trainer = _trainer(task, args, draw(tokens // 8, seed=seed))
        budget = Budget(tokens)
        trainer.add_callback(budget)
        seconds = quiet(trainer).train().metrics["train_runtime"]
        right = accuracy(trainer.model, trainer.processing_class, draw(PROBLEMS, held_out=True))
    return {
        "accuracy": right,
        "entropy": statistics.mean(budget.entropy[-5:]),
        "steps": len(budget.loss),
        "tokens": budget.written,
        "seconds": seconds,
        "loss": budget.loss,
    }


def _trainer(task: str, args: OPSDConfig, problems: list[Any]) -> OPSDTrainer:
    if task == "arithmetic":
        return OPSDTrainer(model=STUDENT, teacher_model=TEACHER, args=args, train_dataset=prompts(problems))
    rows = prompts_with_solutions(problems)
    return OPSDTrainer(model=READER, args=args, train_dataset=rows, peft_config=adapter())


def adapter() -> LoraConfig:
    """That of `examples/self_distillation.py`."""
    return LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")


def quiet(trainer: OPSDTrainer) -> OPSDTrainer:
    """A trainer that prints nothing."""
    for callback in (PrinterCallback, ProgressCallback, Banner):
        trainer.remove_callback(callback)
    return trainer


def main() -> None:
    asked = options(
        __doc__,
        tokens=150_000,
        seeds=[0, 1, 2],
        tasks=list(TASKS),
        objectives=list(OBJECTIVES),
        output="out/objectives.jsonl",
    )
    keys = (
        {"task": task, "objective": name, "seed": seed, "budget": asked.tokens}
        for seed in asked.seeds
        for task in asked.tasks
        for name in asked.objectives
    )
    studied(asked.output, keys, lambda task, name, *rest: trained(task, OBJECTIVES[name], *rest))
    found = [one for one in read(asked.output) if one["budget"] == asked.tokens]
    print(summary(found, ["task", "objective"], {"accuracy": 3, "entropy": 3, "steps": 0}))


if __name__ == "__main__":
    main()
