"""Trains on both tasks of the examples with each objective, for equally many tokens, and tabulates what was learned.

    python benchmarks/objectives.py --tokens 150000 --seeds 0 1 2 --output out/objectives.jsonl

A line of the output is one training: it is appended when that has ended, and what it holds is not trained again, so a
study can be interrupted, and several can fill one file. Accuracy is greedy, on held-out problems. Tokens are those that
the student has written. `--picture` draws the curves of the loss.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from arithmetic import READER, STUDENT, TEACHER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts, prompts_with_solutions
from divergences import AdaptiveKL, AlphaDivergence
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl
from transformers.utils.logging import disable_progress_bar

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.describe import Banner

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


def trained(task: str, options: Mapping[str, Any], seed: int, tokens: int) -> dict[str, Any]:
    """Trains once; what was learned, and the loss of each step."""
    steps = 2 * tokens // ROWS  # never reached: a completion has several tokens
    with tempfile.TemporaryDirectory() as folder:
        same = {
            "max_steps": steps,
            "per_device_train_batch_size": ROWS,
            "max_completion_length": LONGEST,
            "top_p": 0.6,
            "learning_rate": 1e-3 if task == "arithmetic" else 5e-3,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 10,
            "adam_beta2": 0.98,
            "logging_steps": 1,
            "seed": seed,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        args = OPSDConfig(folder, **{**same, **_of_task(task), **options})
        trainer = _trainer(task, args, draw(tokens // 8, seed=seed))
        budget = Budget(tokens)
        for callback in (PrinterCallback, ProgressCallback, Banner):
            trainer.remove_callback(callback)
        trainer.add_callback(budget)
        seconds = trainer.train().metrics["train_runtime"]
        right = accuracy(trainer.model, trainer.processing_class, draw(PROBLEMS, held_out=True))
    return {
        "accuracy": right,
        "entropy": statistics.mean(budget.entropy[-5:]),
        "steps": len(budget.loss),
        "tokens": budget.written,
        "seconds": seconds,
        "loss": budget.loss,
    }


def _of_task(task: str) -> dict[str, Any]:
    own = {"teacher_model_kind": "base", "teacher_prompt_template": "{prompt}{privileged_context}"}
    return {} if task == "arithmetic" else own


def _trainer(task: str, args: OPSDConfig, problems: list[Any]) -> OPSDTrainer:
    if task == "arithmetic":
        return OPSDTrainer(model=STUDENT, teacher_model=TEACHER, args=args, train_dataset=prompts(problems))
    adapter = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
    return OPSDTrainer(model=READER, args=args, train_dataset=prompts_with_solutions(problems), peft_config=adapter)


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """The mean and the range over seeds, for each task and objective, the most accurate first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in found:
        groups.setdefault((one["task"], one["objective"]), []).append(one)
    lines = ["| task | objective | accuracy, mean (range) | entropy at the end | steps |", "|---|---|---|---|---|"]

    def mean(group: list[Mapping[str, Any]], name: str) -> float:
        return statistics.mean(one[name] for one in group)

    for (task, name), group in sorted(groups.items(), key=lambda item: (item[0][0], -mean(item[1], "accuracy"))):
        right = [one["accuracy"] for one in group]
        lines.append(
            f"| {task} | {name} | {mean(group, 'accuracy'):.3f} ({min(right):.3f}–{max(right):.3f}) | "
            f"{mean(group, 'entropy'):.3f} | {mean(group, 'steps'):.0f} |"
        )
    return "\n".join(lines)


def draw_curves(found: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws the loss of each step of the clipped and the unclipped KLs, of the first seed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(10, 4), sharex=False)
    for axis, task in zip(axes, TASKS, strict=True):
        seen = set()
        for one in found:
            if one["task"] == task and "_kl" in one["objective"] and one["objective"] not in seen:
                plain = one["objective"] in ("forward_kl", "reverse_kl")
                if plain or "clipped" in one["objective"]:
                    seen.add(one["objective"])
                    axis.plot(one["loss"], label=one["objective"], linewidth=1)
        axis.set(title=task, xlabel="step", ylabel="loss, nats per token")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def studied(path: Path, keys: Iterable[dict[str, Any]], train: Callable[..., dict[str, Any]]) -> None:
    """Trains with the values of each key that has no line in the file yet, and appends one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    disable_progress_bar()
    for key in keys:
        if any(key.items() <= one.items() for one in read(path)):
            continue
        line = {**key, **train(*key.values())}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{', '.join(map(str, key.values()))}: {line['accuracy']:.3f}, {line['seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=150_000, help="written by the student in each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(OBJECTIVES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("out/objectives.jsonl"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    keys = (
        {"task": task, "objective": name, "seed": seed, "budget": options.tokens}
        for seed in options.seeds
        for task in options.tasks
        for name in options.objectives
    )
    studied(options.output, keys, lambda task, name, *rest: trained(task, OBJECTIVES[name], *rest))
    found = [one for one in read(options.output) if one["budget"] == options.tokens]
    print(table(found))
    if options.picture is not None:
        draw_curves(found, options.picture)


if __name__ == "__main__":
    main()
