"""Compares on-policy, off-policy and supervised training of one student, with equal completions, steps and seeds.

    python benchmarks/compare.py --output out/compare

All runs of a setting start from the same student and train on the same number of completions, with the same optimizer
and schedule. Results are saved in the output folder and not recomputed, so an interrupted comparison can be resumed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from arithmetic import STUDENT, TEACHER
from arithmetic.evaluate import accuracy, answers
from arithmetic.make_models import supervise
from arithmetic.task import Problem, draw, prompts

from trl_opsd import FixedRollout, OPSDConfig, OPSDTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The conditions under which the methods are compared."""

    different: int | None = None
    """Distinct problems to train on, in several passes; `None` is a new one for every completion."""

    practised: bool = False
    """Whether the student is first trained on all kinds of problems, until it is right more often than not."""

    learning_rate: float | None = None
    """Replaces the one given on the command line."""

    top_p: float = 0.6
    """For the student's rollouts; at 1 it makes all its mistakes."""


SETTINGS = {
    "many problems": Setting(),
    "few problems": Setting(different=200),
    "few problems, practised student": Setting(different=50, practised=True, learning_rate=3e-4, top_p=1.0),
}

PRACTICE = 200
"""Optimizer steps of 64 worked solutions, which raise the accuracy of the shipped student from 0.3 to 0.9."""

BATCH = 32
"""Completions in an optimizer step."""

LEFT_OUT = {
    (method, name)
    for name, setting in SETTINGS.items()
    for method in ("on-policy, reverse KL", "on-policy, JSD")
    if setting.different
}
"""With few problems the question is whose text to train on, not which divergence to use: one is enough."""

MEASUREMENTS = 5
"""Points on a curve after the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run, before a method is chosen."""

    student: str
    problems: list[Problem]
    top_p: float
    options: dict[str, Any]
    """For the configuration of any trainer."""
    curve: Curve


def on_policy(divergence: str) -> Callable[[Job], OPSDTrainer]:
    """The student writes, and the teacher scores its completions."""

    def build(job: Job) -> OPSDTrainer:
        return OPSDTrainer(
            model=job.student,
            teacher_model=TEACHER,
            args=OPSDConfig(divergence=divergence, max_completion_length=40, top_p=job.top_p, **job.options),
            train_dataset=prompts(job.problems),
            callbacks=[job.curve],
        )

    return build


def off_policy(job: Job) -> OPSDTrainer:
    """The teacher writes one completion for each problem; the student is distilled on these, with forward KL."""
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    distinct = list(dict.fromkeys(job.problems))
    torch.manual_seed(job.options["seed"])
    written = answers(AutoModelForCausalLM.from_pretrained(TEACHER), tokenizer, distinct, temperature=1.0)
    asked = tokenizer.apply_chat_template([p.prompt for p in distinct], add_generation_prompt=True)["input_ids"]
    recorded = {tuple(prompt): completion for prompt, completion in zip(asked, written, strict=True)}
    return OPSDTrainer(
        model=job.student,
        teacher_model=TEACHER,
        args=OPSDConfig(divergence="forward_kl", max_completion_length=40, **job.options),
        train_dataset=prompts(job.problems),
        callbacks=[job.curve],
        rollout=FixedRollout(recorded),
    )


def supervised(job: Job) -> SFTTrainer:
    """Next-token training on correct worked solutions; there is no teacher."""
    rows = {"prompt": [p.prompt for p in job.problems], "completion": [p.completion for p in job.problems]}
    args = SFTConfig(**job.options)
    return SFTTrainer(model=job.student, args=args, train_dataset=Dataset.from_dict(rows), callbacks=[job.curve])


METHODS: dict[str, Callable[[Job], Any]] = {
    "on-policy, reverse KL": on_policy("reverse_kl"),
    "on-policy, forward KL": on_policy("forward_kl"),
    "on-policy, JSD": on_policy("jsd"),
    "off-policy, teacher's completions": off_policy,
    "supervised, worked solutions": supervised,
}


class Curve(TrainerCallback):
    """Measures greedy accuracy a few times during training."""

    def __init__(self, held_out: list[Problem], steps: int) -> None:
        self.held_out = held_out
        self.every = max(steps // MEASUREMENTS, 1)
        self.points: dict[int, float] = {}
        self.lengths: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._measure(state, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure(state, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])

    def _measure(self, state: Any, *, model: Any, processing_class: Any, **_: Any) -> None:
        self.points[state.global_step] = accuracy(model, processing_class, self.held_out)


def training_problems(different: int | None, completions: int, seed: int) -> list[Problem]:
    """One problem for each completion: all distinct, or several passes over a small pool."""
    pool = draw(different or completions, seed=1000 + seed)
    source, problems = random.Random(seed), []
    while len(problems) < completions:
        problems += source.sample(pool, len(pool))
    return problems[:completions]


def practised(folder: Path, steps: int) -> str:
    """The path of the shipped student after practice, trained once for an output folder."""
    path = folder / "practised-student"
    if not (path / "config.json").exists():
        tokenizer, model = AutoTokenizer.from_pretrained(STUDENT), AutoModelForCausalLM.from_pretrained(STUDENT)
        supervise(model, tokenizer, draw(50_000, seed=5), steps=steps, learning_rate=1e-3)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return str(path)


def run(method: str, setting: str, seed: int, asked: argparse.Namespace, held_out: list[Problem]) -> dict[str, Any]:
    """Trains once and returns the accuracy of the student."""
    what = SETTINGS[setting]
    problems = training_problems(what.different, BATCH * asked.steps, seed)
    options = {
        "output_dir": str(asked.output / "scratch"),
        "max_steps": asked.steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": what.learning_rate or asked.learning_rate,
        "adam_beta2": 0.98,
        "warmup_steps": min(10, asked.steps),
        "seed": seed,
        "logging_steps": 1,
        "bf16": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    curve = Curve(held_out, asked.steps)
    student = practised(asked.output, asked.practice) if what.practised else STUDENT
    job = Job(student=student, problems=problems, top_p=what.top_p, options=options, curve=curve)
    trainer = METHODS[method](job)
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    return {
        "method": method,
        "setting": setting,
        "seed": seed,
        "steps": asked.steps,
        "learning_rate": options["learning_rate"],
        "tokens": round(BATCH * sum(curve.lengths)) or sum(len(problem.solution) + 1 for problem in problems),
        "curve": curve.points,
        "greedy": accuracy(trainer.model, trainer.processing_class, held_out),
        "sampled": accuracy(trainer.model, trainer.processing_class, held_out, temperature=1.0),
        "seconds": round(time.perf_counter() - start, 1),
    }


def table(results: list[dict[str, Any]], setting: str) -> str:
    """Means over the seeds, with minimum and maximum, as Markdown."""
    lines = ["| | greedy accuracy | sampled at temperature 1 | trained tokens |", "|---|---|---|---|"]
    for method, runs in _by_method(results, setting).items():
        tokens = sum(result["tokens"] for result in runs) / len(runs)
        lines.append(f"| {method} | {_range(runs, 'greedy')} | {_range(runs, 'sampled')} | {tokens:,.0f} |")
    return "\n".join(lines)


def _by_method(results: list[dict[str, Any]], setting: str) -> dict[str, list[dict[str, Any]]]:
    here = [result for result in results if result["setting"] == setting]
    runs = {method: [result for result in here if result["method"] == method] for method in METHODS}
    return {method: some for method, some in runs.items() if some}


def _range(runs: list[dict[str, Any]], name: str) -> str:
    values = [result[name] for result in runs]
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} – {max(values):.3f})"


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Plots accuracy over optimizer steps, a panel for each setting: mean over the seeds, and their range as a band."""
    from matplotlib.figure import Figure

    colors = {method: f"C{number}" for number, method in enumerate(METHODS)}
    settings = list(dict.fromkeys(result["setting"] for result in results))
    figure = Figure(figsize=(5 * len(settings), 4), layout="constrained")
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        for method, runs in _by_method(results, setting).items():
            steps = [int(step) for step in runs[0]["curve"]]
            points = list(zip(*(result["curve"].values() for result in runs), strict=True))
            means, low, high = ([of(values) for values in points] for of in (statistics.mean, min, max))
            axes.plot(steps, means, color=colors[method], label=method)
            axes.fill_between(steps, low, high, alpha=0.2, color=colors[method])
        axes.set(title=setting, xlabel=f"optimizer step ({BATCH} completions each)", ylim=(0, 1.02))
    panels[0].set_ylabel("greedy accuracy on held-out problems")
    panels[0].legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="On-policy, off-policy and supervised training, side by side.")
    parser.add_argument("--output", type=Path, default=Path("out/compare"))
    parser.add_argument("--steps", type=int, default=100, help=f"optimizer steps of {BATCH} completions")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--practice", type=int, default=PRACTICE, help="steps of the student that practises first")
    parser.add_argument("--held-out", type=int, default=300, help="problems to measure accuracy on")
    asked = parser.parse_args(arguments)

    held_out = draw(asked.held_out, held_out=True)
    results = [
        _cached_run(method, setting, seed, asked, held_out)
        for seed in asked.seeds
        for setting in asked.settings
        for method in METHODS
        if (method, setting) not in LEFT_OUT
    ]
    for setting in asked.settings:
        print(f"\n{setting}\n\n{table(results, setting)}")
    picture(results, asked.output / "comparison.png")
    return results


def _cached_run(
    method: str, setting: str, seed: int, asked: argparse.Namespace, held_out: list[Problem]
) -> dict[str, Any]:
    """The result of a run, loaded if it is in the output folder, else computed and saved."""
    words = "".join(letter if letter.isalpha() else " " for letter in f"{method} {setting}").split()
    rate = SETTINGS[setting].learning_rate or asked.learning_rate
    path = asked.output / ("-".join([*words, f"seed{seed}", f"{asked.steps}steps", f"{rate:g}"]) + ".json")
    if not path.exists():
        result = run(method, setting, seed, asked, held_out)
        asked.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        print(f"{method} | {setting} | seed {seed}: {result['greedy']:.3f} in {result['seconds']:.0f} s", flush=True)
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
