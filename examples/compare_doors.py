"""Trains an agent that has to try doors in several ways, up to the same number of tokens, and measures who gets out.

    python examples/compare_doors.py --output out/doors

The task is in `doors/world.py`: no agent can know the doors, its teacher reads them, and who only ever saw walks of
someone who knows has never seen a closed one. Results are saved in the output folder and not recomputed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from datasets import Dataset
from doors import GUIDE, STUDENT, TEACHER
from doors.world import MAX_COMPLETION, ROOMS, DoorsAfterwards, Maze, draw, escaped, rows, try_door
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_opsd import HFRollout, OPSDConfig, OPSDTrainer

BATCH = 32
"""Walks in an optimizer step."""

MAZES_TO_TRAIN = 7500


class ByTeacher(HFRollout):
    """Writes what the teacher would, who reads the doors, in place of the student: text that is off-policy."""

    def bind(self, trainer: Any) -> None:
        super().bind(trainer)
        self._of_teacher = AutoModelForCausalLM.from_pretrained(TEACHER).eval()
        self._told: dict[tuple[int, ...], list[int]] = {}
        for row in trainer.train_dataset:
            asked, told = (
                trainer.processing_class.apply_chat_template(row[name], add_generation_prompt=True)["input_ids"]
                for name in ("prompt", "teacher_prompt")
            )
            self._told[tuple(asked)] = told

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        if not self._trainer.model.training:
            return super().complete(prompt_ids, step)
        width = len(next(iter(self._told)))
        told = [self._told[tuple(ids[:width])] + ids[width:] for ids in prompt_ids]
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
        teacher (`str`): a path.
        is_on_policy (`bool`): whether the student writes what it learns from.
        is_told (`bool`): whether the student reads the doors too.
        tells_afterwards (`bool`): whether an environment tells the teacher the doors after the walk, as feedback.
        options (`Mapping[str, Any]`): further ones of the trainer with a teacher.
    """

    divergence: str | None = None
    walks: str | None = None
    teacher: str = TEACHER
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
    "on-policy, the doors told after the walk": Method(
        divergence="forward_kl", tells_afterwards=True, options={"feedback_template": "{feedback}"}
    ),
    "on-policy, a teacher that never saw a closed door": Method(divergence="forward_kl", teacher=GUIDE),
    "told the doors: on-policy, forward KL": Method(divergence="forward_kl", is_told=True),
    "told the doors: supervised, straight walks": Method(walks="straight", is_told=True),
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
    """Evaluates agents on mazes that are held out, by [`escaped`].

    Args:
        folder (`Path`):
            For files of trainers.
        count (`int`):
            Mazes of each number of rooms.
        is_told (`bool`):
            Whether agents read the doors.
    """

    def __init__(self, folder: Path, count: int, is_told: bool) -> None:
        mazes = {str(number): draw(count, rooms=[number], held_out=True) for number in ROOMS}
        self._trainer = _distiller(
            Method(is_told=is_told),
            {"eval_dataset": {name: rows(some, is_told) for name, some in mazes.items()}},
            output_dir=str(folder / "scratch"),
            per_device_eval_batch_size=count,
        )

    def measure(self, model: Any, greedy: bool = True) -> dict[str, float]:
        """The share of mazes left, by "sampled" or "greedy" and number of rooms."""
        self._trainer.model.load_state_dict(model.state_dict())
        found = {}
        for how, temperature in {"sampled": 1.0, **({"greedy": 0.0} if greedy else {})}.items():
            self._trainer.args.eval_temperature = temperature
            with torch.random.fork_rng():
                figures = self._trainer.evaluate()
            for number in ROOMS:
                found[f"{how}/{number}"] = figures[f"eval_{number}_rewards/escaped/mean"]
        return found


def _distiller(method: Method, given: dict[str, Any], **options: Any) -> OPSDTrainer:
    trainer = OPSDTrainer(
        model=STUDENT,
        teacher_model=method.teacher,
        args=OPSDConfig(
            max_completion_length=MAX_COMPLETION,
            max_tool_calling_iterations=Maze(number="0000", rooms=max(ROOMS)).budget,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_completions=False,
            **{"divergence": method.divergence, **options},
        ),
        **({"environment_factory": DoorsAfterwards} if method.tells_afterwards else {"tools": [try_door]}),
        reward_funcs=escaped,
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def build(method: Method, mazes: Sequence[Maze], curve: Curve, seed: int, rate: float, folder: Path) -> Any:
    """The trainer of a method, from the shipped student."""
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
        given: dict[str, Any] = {"train_dataset": rows(mazes, method.is_told), "callbacks": [curve]}
        if method.tells_afterwards:
            given["train_dataset"] = given["train_dataset"].remove_columns("teacher_prompt")
        if not method.is_on_policy:
            given["rollout"] = ByTeacher()
        return _distiller(method, given, **options, **method.options)
    source = random.Random(seed)
    walks = [maze.searched(source) if method.walks == "searched" else maze.straight() for maze in mazes]
    asked = [maze.prompt_with_hint if method.is_told else maze.prompt for maze in mazes]
    texts = [prompt + maze.messages(walk) for prompt, maze, walk in zip(asked, mazes, walks, strict=True)]
    common = {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none"}
    trainer = SFTTrainer(
        model=STUDENT,
        args=SFTConfig(assistant_only_loss=True, disable_tqdm=True, **common, **options),
        train_dataset=Dataset.from_list([{"messages": text} for text in texts]),
        callbacks=[curve],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Trains once, and returns the measurements."""
    method = {**METHODS, **CONTROLS}[name]
    judge = Judge(asked.output, asked.held_out, method.is_told)
    curve = Curve(judge.measure, {"tokens": asked.tokens, "seconds": asked.seconds}, asked.points)
    mazes = draw(MAZES_TO_TRAIN, seed=seed)
    trainer = build(method, mazes, curve, seed, asked.learning_rate, asked.output)
    trainer.train()
    return {"method": name, "seed": seed, "learning_rate": asked.learning_rate, "points": curve.points}


def at(points: Sequence[dict[str, float]], spent: str, most: float) -> dict[str, float]:
    """The first measurement after so many "tokens" or "seconds"."""
    return next((point for point in points if point[spent] >= most), points[-1])


def table(results: Sequence[dict[str, Any]], spent: str, most: float, how: str = "sampled") -> str:
    """Means over the seeds, with minimum and maximum, as Markdown."""
    lines = [f"| | {' | '.join(f'{number} rooms' for number in ROOMS)} |", "|---" * (len(ROOMS) + 1) + "|"]
    for name in dict.fromkeys(result["method"] for result in results):
        runs = [at(result["points"], spent, most) for result in results if result["method"] == name]
        cells = [_range([point[f"{how}/{number}"] for point in runs]) for number in ROOMS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} – {max(values):.2f})"


def picture(results: Sequence[dict[str, Any]], tokens: float, path: Path) -> None:
    """Who gets out, by tokens trained on with two rooms, and by the number of rooms in the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    grid = numpy.linspace(0, tokens, 61)
    for name in dict.fromkeys(result["method"] for result in results):
        runs = [result["points"] for result in results if result["method"] == name]
        style = {"linestyle": "-" if name in METHODS else "--"}
        curves = [[[point[what] for point in points] for what in ("tokens", "sampled/2")] for points in runs]
        mean = numpy.mean([numpy.interp(grid, *curve) for curve in curves], axis=0)
        (line,) = left.plot(grid, mean, label=name, **style)
        ends = [at(points, "tokens", tokens) for points in runs]
        by_rooms = [[point[f"sampled/{number}"] for point in ends] for number in ROOMS]
        right.plot(ROOMS, [statistics.mean(some) for some in by_rooms], color=line.get_color(), marker="o", **style)
        right.fill_between(ROOMS, [*map(min, by_rooms)], [*map(max, by_rooms)], color=line.get_color(), alpha=0.15)
    left.set(xlabel="tokens trained on", ylabel="share of held-out mazes left", title="two rooms", ylim=(0, 1.02))
    right.set(xlabel="rooms", xticks=list(ROOMS), title=f"after {tokens:,.0f} tokens")
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="An agent that has to try doors, trained in several ways.")
    parser.add_argument("--output", type=Path, default=Path("out/doors"))
    parser.add_argument("--tokens", type=float, default=900_000, help="tokens that each run trains on at least")
    parser.add_argument("--seconds", type=float, default=250, help="seconds that each run trains for at least")
    parser.add_argument("--points", type=int, default=5, help="measurements until tokens and seconds are spent")
    parser.add_argument("--held-out", type=int, default=100, help="mazes of each number of rooms to measure with")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *CONTROLS], default=[*METHODS, *CONTROLS])
    asked = parser.parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)

    results = [_cached_run(name, seed, asked) for seed in asked.seeds for name in asked.methods]
    for spent in ("tokens", "seconds"):
        most = getattr(asked, spent)
        for how in ("sampled", "greedy"):
            print(f"\nafter {most:,.0f} {spent}, {how}\n\n{table(results, spent, most, how)}")
    picture(results, asked.tokens, asked.output / "doors.png")
    return results


def _cached_run(name: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The result of a run, loaded if it is in the output folder, else computed and saved."""
    words = "".join(letter if letter.isalpha() else " " for letter in name).split()
    path = asked.output / ("-".join([*words, f"seed{seed}", f"{asked.tokens:g}", f"{asked.learning_rate:g}"]) + ".json")
    if not path.exists():
        start = time.perf_counter()
        result = run(name, seed, asked)
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")
        last = result["points"][-1]
        print(
            f"{name} | seed {seed}: {last['sampled/2']:.2f} of two rooms, {last['tokens']:,.0f} tokens, "
            f"{last['seconds']:.0f} s, with measurements {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
