"""Trains the self-teaching student of the examples with each remedy and each control, for equally many tokens.

    python benchmarks/remedies.py --seeds 0 1 2 --output out/remedies.jsonl --picture out/remedies.png

A line of the output is one training, as in `objectives.py`. Accuracy is of held-out problems; length and entropy are of
the last steps; retention is the accuracy where the solution is in the prompt, which the student could copy at first.
`--task doors` and `--task rule` train the other students of the examples.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import compare_agents
from arithmetic import READER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts_with_solutions, right
from divergences import EntropyAwareKL
from methods.controls import Constant, Shuffled, Unprivileged
from methods.small_methods import AlongCompletion, ShortAtFirst
from objectives import LONGEST, PROBLEMS, Budget, read, studied
from peft import LoraConfig
from real_model import distil
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from trl_opsd import OPSDConfig, OPSDTrainer
from trl_opsd.describe import Banner
from trl_opsd.methods import Rewards

ROWS = 32
"""Completions of a step on arithmetic."""
COLUMNS = {"accuracy": 3, "retention": 3, "length": 1, "entropy": 3, "steps": 0, "seconds": 0}
"""Of the table, with their decimals."""
GROUPS = {"num_generations": 4, "learning_rate": 1e-3}
"""At the rate of the others, plain self-distillation with four completions of a prompt ends below its start."""

REMEDIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, 4 of a prompt": GROUPS,
    "contrast 0.5": {"methods": {"contrast": {"weight": 0.5}}},
    "contrast 1, clip 10, on the start (Purified)": {
        "methods": {"contrast": {"weight": 1.0, "clip": 10.0}, "extrapolation": {"factor": 0.0}}
    },
    "anchor 0.1": {"methods": {"anchor": {"weight": 0.1}}},
    "anchor 1": {"methods": {"anchor": {"weight": 1.0}}},
    "extrapolation 1.25": {"methods": {"extrapolation": {"factor": 1.25}}},
    "entropy-aware KL": {"divergence": EntropyAwareKL()},
    "rising weights": {"methods": [AlongCompletion((0.25, 0.35, 0.6, 0.9, 1, 1, 1, 1, 1, 1, 1))]},
    "half by teacher_confidence": {
        "methods": {"token_selection": {"criterion": "teacher_confidence", "fraction": 0.5}}
    },
    "right ones only": {**GROUPS, "methods": [Rewards(right, gate=1.0)]},
    "weighted by advantage": {**GROUPS, "methods": [Rewards(right, gate="advantage")]},
    "a group's success (SDPO)": {**GROUPS, "methods": [Rewards(right, context="group_success")]},
    "EMA 0.05": {"teacher_model_kind": "ema"},
    "live teacher": {"teacher_model_kind": "live"},
    "live teacher, anchor 1": {"teacher_model_kind": "live", "methods": {"anchor": {"weight": 1.0}}},
    "short at first": {"methods": [ShortAtFirst(12, 100)]},
    "control: shuffled": {"methods": [Shuffled()]},
    "control: unprivileged": {"methods": [Unprivileged()]},
    "control: constant": {"methods": [Constant()], "divergence": None},
}
"""The options that each adds to plain OPSD: forward KL from the student as it was, which reads the solution."""


class Course(TrainerCallback):
    """Measures every so many steps and at the end."""

    def __init__(self, measure: Callable[[Any], dict[str, float]], every: int) -> None:
        self.points: list[dict[str, float]] = []
        self._measure, self._every = measure, every

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step % self._every == 0:
            self.points.append({"step": state.global_step, **self._measure(model)})

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step % self._every:
            self.points.append({"step": state.global_step, **self._measure(model)})


Made = tuple[OPSDTrainer, list[dict[str, float]]]
"""A trainer, and where its measurements go."""


def of_arithmetic(options: Mapping[str, Any], seed: int, tokens: int, folder: str) -> Made:
    """The student of `examples/self_distillation.py`, an adapter; it may forget how to read a solution."""
    same = {
        "teacher_model_kind": "base", "teacher_prompt_template": "{prompt}{privileged_context}",
        "divergence": "forward_kl", "max_steps": tokens // (23 * ROWS), "per_device_train_batch_size": ROWS,
        "max_completion_length": LONGEST, "top_p": 0.6, "learning_rate": 3e-3, "warmup_steps": 10,
        "lr_scheduler_type": "linear", "adam_beta2": 0.98, "logging_steps": 1, "seed": seed,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    problems, held_out = draw(tokens // 8, seed=seed), draw(PROBLEMS, held_out=True)
    rows = prompts_with_solutions(problems).add_column("answer", [one.answer for one in problems])
    alone = [[{"role": "user", "content": one.solution}] for one in problems]  # the reference without the question
    of_config = {name: value for name, value in options.items() if not isinstance(value, list)}
    methods = [copy(one) for one in given] if isinstance(given := options.get("methods"), list) else []
    if not any(isinstance(one, Rewards) for one in methods):
        methods.append(Rewards(right))
    trainer = OPSDTrainer(
        model=READER,
        args=OPSDConfig(folder, **{**same, **of_config}),
        methods=methods,
        train_dataset=rows.add_column("contrast_prompt", alone),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
    )

    def measure(model: Any) -> dict[str, float]:
        shares = [accuracy(model, trainer.processing_class, held_out, show_solution=shown) for shown in (False, True)]
        return dict(zip(("accuracy", "retention"), shares, strict=True))

    course = Course(measure, every=40)
    for callback in (Budget(tokens), course):
        trainer.add_callback(callback)
    return trainer, course.points


def of_doors(options: Mapping[str, Any], seed: int, tokens: int, folder: str) -> Made:
    """The agent of `examples/compare_agents.py`, whose teacher is another model; what it forgets is not measured."""
    task = compare_agents.TASKS["doors"]
    judge = compare_agents.Judge(task, compare_agents.DOORS, Path(folder), 50, is_told=False)

    def measure(model: Any, _: bool) -> dict[str, float]:
        return {"accuracy": statistics.mean(judge.measure(model, greedy=False).values()), "retention": math.nan}

    curve = compare_agents.Curve(measure, {"tokens": tokens, "seconds": 1}, points=5)
    method = compare_agents.Method(divergence="forward_kl", options=options)
    rows = task.world.rows(compare_agents.ROWS_TO_TRAIN, seed=seed)
    trainer = compare_agents.build(task, method, compare_agents.DOORS, rows, curve, seed, 2e-3, Path(folder))
    return trainer, curve.points


def of_rule(options: Mapping[str, Any], seed: int, tokens: int, folder: str) -> Made:
    """The pretrained model of `make real`, which is to talk like a pirate; it may forget facts."""
    asked = argparse.Namespace(
        model=".real/smollm2", divergence="forward_kl", learning_rate=2e-3, steps=tokens // 256, use_vllm=False
    )
    trainer = distil.build(asked, "pirate", seed, Path(folder), **options)
    trainer.args.eval_strategy = "no"

    def measure(_: Any) -> dict[str, float]:
        found = distil.measured(trainer, "pirate", 50)
        return {"accuracy": found["follows"], "retention": found["facts"]}

    course = Course(measure, every=asked.steps + 1)  # at the end alone
    trainer.add_callback(course)
    return trainer, course.points


def trained(task: str, options: Mapping[str, Any], seed: int, tokens: int) -> dict[str, Any]:
    """Trains once; what was learned, and the course of it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, points = TASKS[task][0](options, seed, tokens, folder)
        for callback in (PrinterCallback, ProgressCallback, Banner):
            trainer.remove_callback(callback)
        seconds = trainer.train().metrics["train_runtime"]
    logs = [one for one in trainer.state.log_history if "loss" in one]
    entropies = [one["entropy/student"] for one in logs if "entropy/student" in one]  # of no token where no row counts
    return {
        **{name: points[-1][name] for name in ("accuracy", "retention")},
        "length": statistics.mean(one["completions/mean_length"] for one in logs[-5:]),
        "entropy": statistics.mean(entropies[-5:] or [math.nan]),
        "steps": trainer.state.global_step,
        "seconds": seconds,
        "course": points,
    }


TASKS = {"arithmetic": (of_arithmetic, 118_000), "doors": (of_doors, 900_000), "rule": (of_rule, 7_680)}
"""What builds the trainer, and the tokens of a training; those of the doors have prompts among them."""


def by_remedy(found: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """The figures of the seeds, the most accurate first."""
    groups: dict[str, dict[str, list[float]]] = {}
    for one in found:
        group = groups.setdefault(one["remedy"], {name: [] for name in COLUMNS})
        for name in COLUMNS:
            group[name].append(one[name])
    return dict(sorted(groups.items(), key=lambda item: -statistics.mean(item[1]["accuracy"])))


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """The mean over seeds, and the range of shares."""
    lines = [f"| | {' | '.join(COLUMNS)} | seeds |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, group in by_remedy(found).items():
        cells = [f"{statistics.mean(some):.{COLUMNS[of]}f}" for of, some in group.items()]
        for place, some in enumerate((group["accuracy"], group["retention"])):
            cells[place] += f" ({min(some):.2f}–{max(some):.2f})" if len(some) > 1 else ""
        lines.append(f"| {name} | {' | '.join(cells)} | {len(group['steps'])} |")
    return "\n".join(lines)


def draw_courses(found: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draws what was learned and what was kept along the training: means over seeds, and the ranges."""
    from matplotlib import pyplot

    found = list(found)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for axis, what in zip(axes, ("accuracy", "retention"), strict=True):
        for name in by_remedy(found):
            courses = [one["course"] for one in found if one["remedy"] == name]
            steps = [point["step"] for point in min(courses, key=len)]
            values = [[course[place][what] for course in courses] for place in range(len(steps))]
            style = {"linestyle": "--", "color": "grey"} if name.startswith("control") else {}
            (line,) = axis.plot(steps, [*map(statistics.mean, values)], marker=".", label=name, **style)
            axis.fill_between(steps, [*map(min, values)], [*map(max, values)], color=line.get_color(), alpha=0.2)
        axis.set(xlabel="optimizer step", title=what, ylim=(-0.02, 1.02))
    axes[0].set_ylabel("share of held-out problems")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="arithmetic")
    parser.add_argument("--tokens", type=int, help="of each training; by default those of the task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--remedies", nargs="+", choices=list(REMEDIES), default=list(REMEDIES), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("out/remedies.jsonl"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    budget = options.tokens or TASKS[options.task][1]
    keys = (
        {"task": options.task, "remedy": name, "seed": seed, "budget": budget}
        for seed in options.seeds
        for name in options.remedies
        if options.task == "arithmetic"
        or not isinstance(REMEDIES[name].get("methods"), list)  # whose builder alone takes them
    )
    studied(options.output, keys, lambda task, name, *rest: trained(task, REMEDIES[name], *rest))
    found = [
        one
        for one in read(options.output)
        if (one["task"], one["budget"]) == (options.task, budget) and one["remedy"] in options.remedies
    ]
    print(table(found))
    if options.picture is not None:
        draw_courses(found, options.picture)


if __name__ == "__main__":
    main()
