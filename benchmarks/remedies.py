"""Trains the self-teaching student of the examples with each remedy and each control, for equally many tokens.

    python benchmarks/remedies.py --tokens 750000 --seeds 0 1 2 --output out/remedies.jsonl --picture out/remedies.png

A line of the output is one training, as in `objectives.py`. Accuracy, length and entropy are of held-out problems;
retention is the accuracy where the solution is in the prompt, which the student could copy before it was trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from arithmetic import READER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts_with_solutions, right
from objectives import LONGEST, PROBLEMS, ROWS, Budget, read
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.banner import Banner

EVERY = 50
"""Optimizer steps between two measurements."""
GROUPS = {"num_generations": 4}

REMEDIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, 4 of a prompt": GROUPS,
    "contrast 0.5": {"contrast_weight": 0.5},
    "contrast 1, clip 10, on the start (Purified)": {"contrast_weight": 1, "contrast_clip": 10, "extrapolation": 0},
    "anchor 0.1": {"anchor_weight": 0.1},
    "anchor 1": {"anchor_weight": 1.0},
    "extrapolation 1.25": {"extrapolation": 1.25},
    "entropy-aware KL": {"divergence": "entropy_aware_kl"},
    "rising weights": {"position_weights": [0.25, 0.35, 0.6, 0.9, 1, 1, 1, 1, 1, 1, 1]},
    "half by teacher_confidence": {"token_selection": "teacher_confidence", "token_fraction": 0.5},
    "right ones only": {**GROUPS, "reward_gate": 1.0},
    "weighted by advantage": {**GROUPS, "reward_gate": "advantage"},
    "a group's success (SDPO)": {**GROUPS, "teacher_context": "group_success"},
    "EMA 0.05": {"teacher_model_kind": "ema"},
    "short at first": {"completion_length_start": 12, "completion_length_steps": 100},
    "control: shuffled": {"teacher_control": "shuffled"},
    "control: unprivileged": {"teacher_control": "unprivileged"},
    "control: constant": {"teacher_control": "constant", "divergence": None},
}
"""The options that each adds to plain OPSD: forward KL from the student as it was, which reads the solution."""


class Course(TrainerCallback):
    """Measures the student every so many steps."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.points: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % EVERY == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        model, words, problems = self.trainer.model, self.trainer.processing_class, draw(PROBLEMS, held_out=True)
        self.points.append(
            {
                "step": step,
                "accuracy": accuracy(model, words, problems),
                "retention": accuracy(model, words, problems, show_solution=True),
            }
        )


def trained(options: Mapping[str, Any], seed: int, tokens: int) -> dict[str, Any]:
    """Trains once; what was learned, and the course of it."""
    with tempfile.TemporaryDirectory() as folder:
        same = {
            "teacher_model_kind": "base", "teacher_prompt_template": "{prompt}{privileged_context}",
            "divergence": "forward_kl", "max_steps": 2 * tokens // ROWS, "per_device_train_batch_size": ROWS,
            "max_completion_length": LONGEST, "top_p": 0.6, "learning_rate": 5e-3, "warmup_steps": 10,
            "lr_scheduler_type": "constant_with_warmup", "adam_beta2": 0.98, "logging_steps": 1, "seed": seed,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "collapse_guard": None,
        }  # fmt: skip
        problems = draw(tokens // 8, seed=seed)
        rows = prompts_with_solutions(problems).add_column("answer", [one.answer for one in problems])
        alone = [[{"role": "user", "content": one.solution}] for one in problems]  # the reference without the question
        trainer = OPSDTrainer(
            model=READER,
            args=OPSDConfig(folder, **{**same, **options}),
            train_dataset=rows.add_column("contrast_prompt", alone),
            reward_funcs=right,
            peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
        )
        for callback in (PrinterCallback, ProgressCallback, Banner):
            trainer.remove_callback(callback)
        budget, course = Budget(tokens), Course()
        course.trainer = trainer
        trainer.add_callback(budget)
        trainer.add_callback(course)
        seconds = trainer.train().metrics["train_runtime"]
        course.measure(trainer.state.global_step)
        lengths = [one["completions/mean_length"] for one in trainer.state.log_history if "loss" in one]
    last = course.points[-1]
    return {
        **{name: last[name] for name in ("accuracy", "retention")},
        "best": max(one["accuracy"] for one in course.points),
        "length": statistics.mean(lengths[-5:]),
        "entropy": statistics.fmean([one for one in budget.entropy if one == one][-5:]),
        "steps": len(budget.loss),
        "seconds": seconds,
        "course": course.points,
    }


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """The mean and the range over seeds of each, the most accurate at the end first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        groups.setdefault(one["remedy"], []).append(one)
    lines = ["| | accuracy at the end | best | retention | tokens | entropy | steps |", "|---|---|---|---|---|---|---|"]

    def mean(group: list[Mapping[str, Any]], name: str) -> float:
        return statistics.mean(one[name] for one in group)

    for name, group in sorted(groups.items(), key=lambda item: -mean(item[1], "accuracy")):
        ends = [one["accuracy"] for one in group]
        lines.append(
            f"| {name} | {mean(group, 'accuracy'):.3f} ({min(ends):.3f}–{max(ends):.3f}) | {mean(group, 'best'):.3f} | "
            f"{mean(group, 'retention'):.3f} | {mean(group, 'length'):.1f} | {mean(group, 'entropy'):.3f} | "
            f"{mean(group, 'steps'):.0f} |"
        )
    return "\n".join(lines)


def draw_courses(found: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws the accuracy along the training, the mean over seeds."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 5))
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for one in found:
        by_name.setdefault(one["remedy"], []).append(one)
    for name, group in by_name.items():
        steps = min(len(one["course"]) for one in group)
        means = [statistics.mean(one["course"][place]["accuracy"] for one in group) for place in range(steps)]
        style = {"linestyle": "--", "color": "grey"} if name.startswith("control") else {}
        width = 3 if name == "plain" else 1.2
        axis.plot([one["step"] for one in group[0]["course"][:steps]], means, label=name, linewidth=width, **style)
    axis.set(xlabel="step", ylabel="accuracy, held out, greedy")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=300_000, help="written by the student in each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--remedies", nargs="+", choices=list(REMEDIES), default=list(REMEDIES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("out/remedies.jsonl"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    disable_progress_bar()
    for seed in options.seeds:
        for name in options.remedies:
            key = {"remedy": name, "seed": seed, "budget": options.tokens}
            if any(key.items() <= one.items() for one in read(options.output)):
                continue
            line = {**key, **trained(REMEDIES[name], seed, options.tokens)}
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name}, seed {seed}: {line['accuracy']:.3f}, {line['seconds']:.0f} s", flush=True)
    found = [one for one in read(options.output) if one["budget"] == options.tokens]
    print(table(found))
    if options.picture is not None:
        draw_courses(found, options.picture)


if __name__ == "__main__":
    main()
