"""Measures a step that waits for all of its rows against one that learns from them as they end (`overlap="step"`).

    python benchmarks/overlap.py                                        # 64 rows, two at a time
    python benchmarks/overlap.py --teacher apart --picture overlap.png

A rollout, a teacher and a student of given speeds: what they take is slept, on top of a tiny model's own time, so the
figures are those of the trainer's schedule on any machine. Completions have lognormal lengths of --mean tokens. Each is
written in a time proportional to its own, the longest in --rollout seconds, all at once, as by an engine on a device of
its own. The teacher reads and the student learns in times proportional to the tokens, which add up to --teach and
--learn seconds for the rows of a step. A teacher "here" reads when it is asked for its targets; one "apart" begins when
it is told of a row, and reads row by row. Runs alternate; seconds are medians over their steps, without the first.

"ratio" is the step divided by max(rollout, teach + learn), which no schedule with two devices can go below.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from common import options, show
from datasets import Dataset
from support import tiny
from transformers import TrainerCallback

from trl_opsd import FixedRollout, FrozenTeacher, OPSDTrainer, Teacher
from trl_opsd.teacher.frozen import Resident
from trl_opsd.types import LossParts, OutputHead, Rollout, TeacherTargets

Spans = dict[str, list[tuple[float, float]]]
"""Begin and end of what happened in a step, in seconds since its begin, by who did it."""


@dataclass
class Watch:
    """What happens in the steps of a run."""

    steps: list[Spans] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    start: float = 0.0

    def note(self, who: str, begin: float, end: float) -> None:
        self.steps[-1][who].append((begin - self.start, end - self.start))

    def sleep(self, who: str, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.note(who, begin, time.perf_counter())


class Steps(TrainerCallback):
    """Times the steps of a run."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._watch.steps.append({"rollout": [], "teacher": [], "student": []})
        self._watch.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.seconds.append(time.perf_counter() - self._watch.start)


class Writing(FixedRollout):
    """Writes all rows at once, each in a time proportional to its length."""

    generates_out_of_process = True

    def __init__(self, completions: dict[tuple[int, ...], list[int]], per_token: float, watch: Watch) -> None:
        super().__init__(completions)
        self._per_token, self._watch = per_token, watch

    def complete(self, prompt_ids: list[list[int]], step: int) -> list[list[int]]:
        return [ids for _, ids in sorted(self.stream(prompt_ids, step))]

    def stream(self, prompt_ids: list[list[int]], step: int) -> Generator[tuple[int, list[int]], None, None]:
        written = super().complete(prompt_ids, step)
        begin = time.perf_counter()
        for row in sorted(range(len(written)), key=lambda row: len(written[row])):
            end = begin + self._per_token * len(written[row])
            time.sleep(max(0.0, end - time.perf_counter()))
            self._watch.note("rollout", begin, end)
            yield row, written[row]


class BatchPolicy(Teacher):
    """Reads in a time proportional to the tokens; `apart`, row by row from when it is told of a row."""

    def __init__(self, inner: Teacher, per_token: float, apart: bool, watch: Watch) -> None:
        self._inner, self._per_token, self._watch = inner, per_token, watch
        self._queue = ThreadPoolExecutor(1) if apart else None
        self._begun: dict[tuple[int, ...], Future[None]] = {}

    @property
    def head(self) -> OutputHead:
        return self._inner.head

    @property
    def context(self) -> int | None:
        return self._inner.context

    def expect(self, rollout: Rollout) -> None:
        if self._queue is not None:
            for prompt, ids in zip(rollout.prompt_lists(), rollout.completion_lists(), strict=True):
                begun = self._queue.submit(self._watch.sleep, "teacher", self._per_token * len(ids))
                self._begun[tuple(prompt)] = begun

    def targets(self, rollout: Rollout) -> TeacherTargets:
        if self._queue is None:
            self._watch.sleep("teacher", self._per_token * sum(map(len, rollout.completion_lists())))
        else:
            prompts = [tuple(prompt) for prompt in rollout.prompt_lists()]
            if any(prompt not in self._begun for prompt in prompts):  # a step that waits tells nothing
                self.expect(rollout)
            for prompt in prompts:
                self._begun.pop(prompt).result()
        return self._inner.targets(rollout)


class Learning(OPSDTrainer):
    """Learns in a time proportional to the tokens."""

    per_token = 0.0
    watch: Watch

    def compare(self, student: Any, rollout: Rollout, targets: TeacherTargets, num_items: Any) -> LossParts:
        self.watch.sleep("student", self.per_token * float(rollout.counts.sum()))
        return super().compare(student, rollout, targets, num_items)


def lengths(rows: int, mean: float, sigma: float, most: int) -> list[int]:
    """Lognormal lengths of completions, in tokens."""
    generator = random.Random(0)
    location = torch.tensor(mean).log().item() - sigma**2 / 2
    return [max(1, min(most, round(generator.lognormvariate(location, sigma)))) for _ in range(rows)]


def run(overlap: str | None, asked: argparse.Namespace, folder: str) -> Watch:
    """One training of `--steps` steps and one more."""
    watch = Watch()
    words = tiny.tokenizer()
    prompts = [f"row {row:04}" for row in range(asked.rows)]
    sizes = lengths(asked.rows, asked.mean, asked.sigma, 200)
    recorded = {
        tuple(words(prompt)["input_ids"]): [7 + row % 100] * size
        for row, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    }
    teacher = FrozenTeacher(Resident(tiny.qwen2(32, seed=1), torch.device("cpu")))
    trainer = Learning(
        model=tiny.qwen2(16, seed=0),
        teacher_model=BatchPolicy(teacher, asked.teach / sum(sizes), asked.teacher == "apart", watch),
        args=tiny.config(
            Path(folder),
            overlap=overlap,
            max_completion_length=200,
            per_device_train_batch_size=asked.at_once,
            gradient_accumulation_steps=asked.rows // asked.at_once,
            max_steps=asked.steps + 1,
            num_train_epochs=asked.steps + 1,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=words,
        rollout=Writing(recorded, asked.rollout / max(sizes), watch),
        callbacks=[Steps(watch)],
    )
    trainer.per_token, trainer.watch = asked.learn / sum(sizes), watch
    trainer.train()
    return watch


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Both schedules in turn, `--repeats` times each."""
    bound = max(asked.rollout, asked.teach + asked.learn)
    watches: dict[str, list[Watch]] = {"waits": [], "overlaps": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.repeats):
            for name, overlap in (("waits", None), ("overlaps", "step")):
                watches[name].append(run(overlap, asked, folder))
    found = []
    for name, runs in watches.items():
        steps = [seconds for one in runs for seconds in one.seconds[1:]]
        spans = runs[-1].steps[-1]
        found.append(
            {
                "step": name,
                "seconds": statistics.median(steps),
                "range": [min(steps), max(steps)],
                "ratio": statistics.median(steps) / bound,
                "first_backward": min(begin for begin, _ in spans["student"]),
                "last_row": max(end for _, end in spans["rollout"]),
                "end": max(end for _, end in spans["student"]),
                "spans": spans,
            }
        )
    return found


def picture(rows: list[dict[str, Any]], path: str) -> None:
    """Draws who is busy when in a step of each kind."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True)
    colors = {"rollout": "C0", "teacher": "C1", "student": "C2"}
    for axes, row in zip(panels, rows, strict=True):
        written = sorted(row["spans"]["rollout"], key=lambda span: span[1])
        for place, (begin, end) in enumerate(written):
            axes.plot([begin, end], [2.6 + place / len(written)] * 2, color=colors["rollout"], linewidth=0.8)
        for height, who in ((1.5, "teacher"), (0.5, "student")):
            bars = [(begin, end - begin) for begin, end in row["spans"][who]]
            axes.broken_barh(bars, (height, 0.8), color=colors[who], edgecolor="white", linewidth=0.3)
        axes.axvline(row["last_row"], color="gray", linestyle=":", linewidth=1)
        axes.set(yticks=[3.1, 1.9, 0.9], yticklabels=["rows written", "teacher", "student"], ylim=(0.3, 3.8))
        axes.set_title({"waits": "overlap=None", "overlaps": 'overlap="step"'}[row["step"]], loc="left", fontsize=10)
    panels[-1].set_xlabel("seconds since the step began; dotted: the last row has been written")
    figure.savefig(path, dpi=120)


def main() -> None:
    asked = options(
        __doc__,
        rows=64,
        at_once=2,
        mean=40.0,
        sigma=0.8,
        rollout=4.0,
        teach=1.0,
        learn=2.0,
        teacher="here",
        steps=3,
        repeats=2,
        picture="",
    )
    torch.set_num_threads(1)  # the models are tiny
    rows = measure(asked)
    if asked.picture:
        picture(rows, asked.picture)
    show([{name: one for name, one in row.items() if name != "spans"} for row in rows], asked.json)


if __name__ == "__main__":
    main()
