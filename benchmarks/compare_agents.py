"""Trains agents in several ways, up to the same number of tokens, and measures who reaches the end.

    python benchmarks/compare_agents.py doors --output out/doors

The tasks are in `agents.py`: no agent can know what its teacher reads, and who only ever saw walks of someone who knows
has never seen what follows a wrong call. Results are saved in the output folder and not recomputed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import agents
from agents import TASKS, Task
from doors import DOORS
from doors.tokenizer import ASSISTANT

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer

BATCH = 32
"""Walks in an optimizer step."""

ROWS_TO_TRAIN = 7500


def environment(task: Task, method: Method) -> type:
    """The task's environment, with what it knows told to whom a method says."""

    class World(task.environment):
        def reset(self, **row: Any) -> str:
            observation = super().reset(**row) or ""
            return f"{observation}\n\n{super().get_privileged_context()}" if method.is_told else observation

        def get_privileged_context(self) -> str | None:
            return None if method.is_told or method.tells_afterwards else super().get_privileged_context()

        def get_feedback(self) -> str | None:
            return super().get_privileged_context() if method.tells_afterwards else None

    return World


class ByTeacher(HFRollout):
    """Writes what the teacher would, who reads more, in place of the student: text that is off-policy."""

    def __init__(self, task: Task, path: Path) -> None:
        super().__init__()
        self._task, self._path = task, path

    def bind(self, trainer: Any) -> None:
        super().bind(trainer)
        self._of_teacher = AutoModelForCausalLM.from_pretrained(self._path).eval()
        self._begin = trainer.processing_class.convert_tokens_to_ids(ASSISTANT)
        self._told: dict[tuple[int, ...], list[int]] = {}
        environment = self._task.environment()
        for row in trainer.train_dataset:
            asked, told = (
                trainer.processing_class.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
                for question in (self._task.question(environment, row, is_told) for is_told in (False, True))
            )
            self._told[tuple(asked)] = told

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        if not self._trainer.model.training:
            return super().complete(prompt_ids, step)
        widths = [ids.index(self._begin) + 1 for ids in prompt_ids]
        told = [self._told[tuple(ids[:width])] + ids[width:] for ids, width in zip(prompt_ids, widths, strict=True)]
        inputs = self._trainer.pad_prompts(told)
        with torch.no_grad():
            written = self._of_teacher.generate(**inputs, generation_config=self._trainer.generation_config)
        return written[:, inputs["input_ids"].size(1) :].tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a student is trained.

    Attributes:
        divergence (`str`, *optional*): that from the teacher; `None` for next-token training on walks.
        walks (`str`, *optional*): the walks, "straight" or "searched".
        teacher (`str`): "teacher" or "guide".
        is_on_policy (`bool`): whether the student writes what it learns from.
        is_told (`bool`): whether the student reads what the teacher reads.
        tells_afterwards (`bool`): whether the teacher is told after the walk, as feedback.
        options (`Mapping[str, Any]`): further ones of the trainer with a teacher.
    """

    divergence: str | None = None
    walks: str | None = None
    teacher: str = "teacher"
    is_on_policy: bool = True
    is_told: bool = False
    tells_afterwards: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "on-policy, forward KL": Method(divergence="forward_kl"),
    "on-policy, JSD": Method(divergence="jsd"),
    "on-policy, reverse KL": Method(divergence="reverse_kl"),
    "off-policy, forward KL": Method(divergence="forward_kl", is_on_policy=False),
    "supervised, straight walks": Method(walks="straight"),
}
CONTROLS = {
    "supervised, walks of a search": Method(walks="searched"),
    "on-policy, told after the walk": Method(
        divergence="forward_kl", tells_afterwards=True, options={"feedback_template": "{feedback}"}
    ),
    "on-policy, with an anchor": Method(divergence="forward_kl", options={"methods": {"anchor": {"weight": 0.1}}}),
    "on-policy, a teacher that saw straight walks only": Method(divergence="forward_kl", teacher="guide"),
    "the student is told too: on-policy, forward KL": Method(divergence="forward_kl", is_told=True),
    "the student is told too: supervised, straight walks": Method(walks="straight", is_told=True),
}


class Curve(TrainerCallback):
    """Measures on the way, lowers the learning rate in the last third, and ends the run when all is spent.

    Args:
        measure (`Callable`):
            Takes the model, and whether this is one of the first or last measurements; returns figures.
        budget (`dict[str, float]`):
            "tokens" that are trained on, and "seconds", without those of measurements.
        points (`int`):
            Measurements until each of the two is spent.
    """

    def __init__(self, measure: Callable[[Any, bool], dict[str, float]], budget: dict[str, float], points: int) -> None:
        self.points: list[dict[str, float]] = []
        self._measure, self._budget, self._points = measure, budget, points
        self._spent = dict.fromkeys(budget, 0.0)
        self._taken, self._began = [0] * len(budget), 0.0

    @property
    def _shares(self) -> list[float]:
        return [min(self._spent[name] / most, 1.0) for name, most in self._budget.items()]

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self._take(model, 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        for group in optimizer.param_groups:  # the schedule, which is constant, sets them anew after each step
            group["lr"] *= min(1.0, 3 * (1 - min(self._shares)) + 0.05)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], *, model: Any, **_: Any) -> None:
        if "num_tokens" not in logs or control.should_training_stop:  # the summary at the end
            return
        self._spent = {
            "tokens": logs["num_tokens"],
            "seconds": self._spent["seconds"] + time.perf_counter() - self._began,
        }
        taken = [int(share * self._points) for share in self._shares]
        if taken != self._taken:
            self._taken = taken
            self._take(model, state.global_step)
        control.should_training_stop = min(self._shares) == 1
        self._began = time.perf_counter()

    def _take(self, model: Any, step: int) -> None:
        figures, spent = self._measure(model, step == 0 or max(self._shares) == 1), self._spent
        self.points.append({"step": step, **spent, **figures})
        shown = ", ".join(f"{name} {share:.2f}" for name, share in figures.items())
        print(f"step {step}, {spent['tokens']:,.0f} tokens, {spent['seconds']:.0f} s: {shown}", flush=True)
        self._began = time.perf_counter()


class Judge:
    """Evaluates agents on rows that are held out, by the reward of their environment.

    Args:
        task (`Task`):
            What they do.
        models (`Path`):
            Folder of the folders "student" and "teacher".
        folder (`Path`):
            For files of trainers.
        count (`int`):
            Rows of each level.
        is_told (`bool`):
            Whether agents read what only the teacher knows.
    """

    def __init__(self, task: Task, models: Path, folder: Path, count: int, is_told: bool) -> None:
        self._levels = task.world.LEVELS
        rows = {str(level): task.world.rows(count, [level], held_out=True) for level in self._levels}
        self._trainer = _distiller(
            task,
            Method(is_told=is_told),
            models,
            {"eval_dataset": rows},
            output_dir=str(folder / "scratch"),
            per_device_eval_batch_size=count,
        )

    def measure(self, model: Any, greedy: bool = True) -> dict[str, float]:
        """The share of rows that are brought to their end, by "sampled" or "greedy" and level."""
        self._trainer.model.load_state_dict(model.state_dict())
        found = {}
        for how, temperature in {"sampled": 1.0, **({"greedy": 0.0} if greedy else {})}.items():
            self._trainer.args.eval_temperature = temperature
            with torch.random.fork_rng():
                figures = self._trainer.evaluate()
            for level in self._levels:
                found[f"{how}/{level}"] = figures[f"eval_{level}_rewards/World/mean"]
        return found


def _distiller(task: Task, method: Method, models: Path, given: dict[str, Any], **options: Any) -> OPSDTrainer:
    trainer = OPSDTrainer(
        model=str(models / "student"),
        teacher_model=str(models / method.teacher),
        args=OPSDConfig(
            max_completion_length=task.world.MOST_TOKENS,
            max_tool_calling_iterations=task.world.MOST_CALLS,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_completions=False,
            **{"divergence": method.divergence, **options},
        ),
        environment_factory=environment(task, method),
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def build(
    task: Task, method: Method, models: Path, rows: Dataset, curve: Curve, seed: int, rate: float, folder: Path
) -> Any:
    """The trainer of a method, from the student in a folder of models."""
    options = {
        "output_dir": str(folder / "scratch"),
        "max_steps": 100_000,
        "per_device_train_batch_size": BATCH,
        "learning_rate": rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "adam_beta2": 0.98,
        "seed": seed,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    if method.divergence:
        given: dict[str, Any] = {"train_dataset": rows, "callbacks": [curve]}
        if not method.is_on_policy:
            given["rollout"] = ByTeacher(task, models / method.teacher)
        return _distiller(task, method, models, given, **options, **method.options)
    source, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(models / "student")
    # Encoded here: a dataset of messages would give each call the arguments of all tools.
    walks = [agents.encoded(tokenizer, task.walk(row, method.walks, source, method.is_told)) for row in rows]
    common = {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none"}
    trainer = SFTTrainer(
        model=str(models / "student"),
        args=SFTConfig(disable_tqdm=True, **common, **options),
        train_dataset=Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in walks]),
        callbacks=[curve],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Trains once, and returns the measurements."""
    task, method = TASKS[asked.task], {**METHODS, **CONTROLS}[name]
    judge = Judge(task, asked.models, asked.output, asked.held_out, method.is_told)
    curve = Curve(judge.measure, {"tokens": asked.tokens, "seconds": asked.seconds}, asked.points)
    rows = task.world.rows(ROWS_TO_TRAIN, seed=seed)
    trainer = build(task, method, asked.models, rows, curve, seed, asked.learning_rate, asked.output)
    trainer.train()
    return {"method": name, "seed": seed, "learning_rate": asked.learning_rate, "points": curve.points}


def at(points: Sequence[dict[str, float]], spent: str, most: float) -> dict[str, float]:
    """The first measurement after so many "tokens" or "seconds"."""
    return next((point for point in points if point[spent] >= most), points[-1])


def table(task: Task, results: Sequence[dict[str, Any]], spent: str, most: float, how: str = "sampled") -> str:
    """Means over the seeds, with minimum and maximum, as Markdown."""
    levels = task.world.LEVELS
    lines = [f"| | {' | '.join(f'{level} {task.world.OF}' for level in levels)} |", "|---" * (len(levels) + 1) + "|"]
    for name in dict.fromkeys(result["method"] for result in results):
        runs = [at(result["points"], spent, most) for result in results if result["method"] == name]
        cells = [_range([point[f"{how}/{level}"] for point in runs]) for level in levels]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} – {max(values):.2f})"


def picture(task: Task, results: Sequence[dict[str, Any]], tokens: float, path: Path) -> None:
    """Who reaches the end, by tokens trained on at the second level, and by the level in the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    grid, levels, of = numpy.linspace(0, tokens, 61), task.world.LEVELS, task.world.OF
    for name in dict.fromkeys(result["method"] for result in results):
        runs = [result["points"] for result in results if result["method"] == name]
        style = {"linestyle": "-" if name in METHODS else "--"}
        curves = [[[point[what] for point in points] for what in ("tokens", f"sampled/{levels[1]}")] for points in runs]
        mean = numpy.mean([numpy.interp(grid, *curve) for curve in curves], axis=0)
        (line,) = left.plot(grid, mean, label=name, **style)
        ends = [at(points, "tokens", tokens) for points in runs]
        by_level = [[point[f"sampled/{level}"] for point in ends] for level in levels]
        right.plot(levels, [statistics.mean(some) for some in by_level], color=line.get_color(), marker="o", **style)
        right.fill_between(levels, [*map(min, by_level)], [*map(max, by_level)], color=line.get_color(), alpha=0.15)
    left.set(
        xlabel="tokens trained on", ylabel="share of held-out rows solved", title=f"{levels[1]} {of}", ylim=(0, 1.02)
    )
    right.set(xlabel=of, xticks=list(levels), title=f"after {tokens:,.0f} tokens")
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Trains agents in several ways, and measures who reaches the end.")
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--models", type=Path, help="folder of the models; made if there are none, but for the doors")
    parser.add_argument("--output", type=Path, help="out/<task> by default")
    parser.add_argument("--tokens", type=float, default=900_000, help="tokens that each run trains on at least")
    parser.add_argument("--seconds", type=float, default=250, help="seconds that each run trains for at least")
    parser.add_argument("--points", type=int, default=5, help="measurements until tokens and seconds are spent")
    parser.add_argument("--held-out", type=int, default=100, help="rows of each level to measure with")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *CONTROLS], default=[*METHODS, *CONTROLS])
    asked = parser.parse_args(arguments)
    asked.output = asked.output or Path("out") / asked.task
    asked.output.mkdir(parents=True, exist_ok=True)
    asked.models = asked.models or (DOORS if asked.task == "doors" else asked.output / "models")
    for name in {"student", *({**METHODS, **CONTROLS}[method].teacher for method in asked.methods)}:
        if not (asked.models / name).exists():
            agents.make(TASKS[asked.task], name, asked.models)

    task, results = (
        TASKS[asked.task],
        [_cached_run(name, seed, asked) for seed in asked.seeds for name in asked.methods],
    )
    for spent in ("tokens", "seconds"):
        most = getattr(asked, spent)
        for how in ("sampled", "greedy"):
            print(f"\nafter {most:,.0f} {spent}, {how}\n\n{table(task, results, spent, most, how)}")
    picture(task, results, asked.tokens, asked.output / f"{asked.task}.png")
    return results


def _cached_run(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, loaded if it is in the output folder, else computed and saved."""
    words = "".join(letter if letter.isalpha() else " " for letter in name).split()
    path = asked.output / ("-".join([*words, f"seed{seed}", f"{asked.tokens:g}", f"{asked.learning_rate:g}"]) + ".json")
    if not path.exists():
        start = time.perf_counter()
        result = run(name, seed, asked)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        last, level = result["points"][-1], TASKS[asked.task].world.LEVELS[1]
        print(
            f"{name} | seed {seed}: {last[f'sampled/{level}']:.2f} at level {level}, {last['tokens']:,.0f} tokens, "
            f"{last['seconds']:.0f} s, with measurements {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
