"""Trains the self-teaching student of the examples with each remedy and each control, for equally many tokens.

    python benchmarks/remedies.py --seeds 0 1 2 --output out/remedies.jsonl --picture out/remedies.png

A line of the output is one training, as in `objectives.py`. Accuracy is of held-out problems; length and entropy are of
the last steps; retention is the accuracy where the solution is in the prompt, which the student could copy at first.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from arithmetic import READER
from arithmetic.evaluate import accuracy
from arithmetic.task import draw, prompts_with_solutions, right
from common import options, read, studied, summary
from divergences import EntropyAwareKL
from methods.controls import Constant, Shuffled, Unprivileged
from methods.small_methods import AlongCompletion, ShortAtFirst
from objectives import COMMON, PROBLEMS, SELF_TAUGHT, Budget, adapter, quiet
from transformers import TrainerCallback

from trl_opsd import OPSDConfig, OPSDTrainer
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
    """Measures every 40 steps and at the end."""

    def __init__(self, measure: Callable[[Any], dict[str, float]]) -> None:
        self.points: list[dict[str, float]] = []
        self._measure = measure

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step % 40 == 0:
            self.points.append({"step": state.global_step, **self._measure(model)})

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step % 40:
            self.points.append({"step": state.global_step, **self._measure(model)})


def trained(given: Mapping[str, Any], seed: int, tokens: int) -> dict[str, Any]:
    """Trains the student of `examples/self_distillation.py` once; what was learned, and the course of it."""
    problems, held_out = draw(tokens // 8, seed=seed), draw(PROBLEMS, held_out=True)
    rows = prompts_with_solutions(problems).add_column("answer", [one.answer for one in problems])
    alone = [[{"role": "user", "content": one.solution}] for one in problems]  # the reference without the question
    of_config = {name: value for name, value in given.items() if not isinstance(value, list)}
    methods = [copy(one) for one in some] if isinstance(some := given.get("methods"), list) else []
    if not any(isinstance(one, Rewards) for one in methods):
        methods.append(Rewards(right))
    same = {
        **COMMON,
        **SELF_TAUGHT,
        "divergence": "forward_kl",
        "max_steps": tokens // (23 * ROWS),
        "per_device_train_batch_size": ROWS,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "linear",
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = OPSDTrainer(
            model=READER,
            args=OPSDConfig(folder, **{**same, **of_config}),
            methods=methods,
            train_dataset=rows.add_column("contrast_prompt", alone),
            peft_config=adapter(),
        )

        def measure(model: Any) -> dict[str, float]:
            shown = {"accuracy": False, "retention": True}
            words = trainer.processing_class
            return {name: accuracy(model, words, held_out, show_solution=one) for name, one in shown.items()}

        course = Course(measure)
        for callback in (Budget(tokens), course):
            trainer.add_callback(callback)
        seconds = quiet(trainer).train().metrics["train_runtime"]
    logs = [one for one in trainer.state.log_history if "loss" in one]
    entropies = [one["entropy/student"] for one in logs if "entropy/student" in one]  # of no token where no row counts
    return {
        **course.points[-1],
        "length": statistics.mean(one["completions/mean_length"] for one in logs[-5:]),
        "entropy": statistics.mean(entropies[-5:] or [math.nan]),
        "steps": trainer.state.global_step,
        "seconds": seconds,
        "course": course.points,
    }


def draw_courses(found: list[dict[str, Any]], path: str) -> None:
    """Draws what was learned and what was kept along the training: means over seeds, and the ranges."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True, layout="constrained")
    for axis, what in zip(axes, ("accuracy", "retention"), strict=True):
        for name in dict.fromkeys(one["remedy"] for one in found):
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
    asked = options(
        __doc__, tokens=118_000, seeds=[0, 1, 2], remedies=list(REMEDIES), output="out/remedies.jsonl", picture=""
    )
    keys = ({"remedy": name, "seed": seed, "budget": asked.tokens} for seed in asked.seeds for name in asked.remedies)
    studied(asked.output, keys, lambda name, *rest: trained(REMEDIES[name], *rest))
    found = [one for one in read(asked.output) if one["budget"] == asked.tokens and one["remedy"] in asked.remedies]
    print(summary(found, ["remedy"], COLUMNS))
    if asked.picture:
        draw_courses(found, asked.picture)


if __name__ == "__main__":
    main()
