"""Compares a training's steps with its first ones, and warns of a collapse or stops; `monitor/course.py` judges."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.checkpoints.resume import best_evaluated
from trl_opsd.loop.host import TrainerHost
from trl_opsd.monitor.course import Course, Figures, is_repetition

__all__ = ["CollapseGuard"]

FILE = "opsd_course.json"
"""File of a checkpoint with the figures of the first and the last steps."""

logger = get_logger(__name__)


@final
class CollapseGuard(TrainerCallback):
    """Warns once of each sign of a collapse, or stops and saves; a resumed training goes on with its course.

    Every process has the same figures, so all stop at the same step.
    """

    def __init__(self, trainer: TrainerHost) -> None:
        self._trainer = trainer
        self._watches, self._stops = trainer.args.collapse_guard is not None, trainer.args.collapse_guard == "stop"
        self.begin()

    def begin(self) -> None:
        """Begins a course, for a new training; before a checkpoint is loaded."""
        self.course = Course()
        self._sums: Counter[str] = Counter()
        self._texts: tuple[float, float] | None = None
        """Mean length and share of repetitions of the step's completions."""
        self._warned: set[str] = set()
        self._has_stopped = False

    # ---- A step -------------------------------------------------------------------------------------------------

    def note_completions(self, completions: Sequence[Sequence[int]]) -> None:
        """Records the share of repetitive completions and their mean length, of those that the student generated, over
        all processes; this one may have none. Collective.
        """
        mine = [len(completions), sum(map(len, completions)), sum(map(is_repetition, completions))]
        accelerator = self._trainer.accelerator
        sums: Any = torch.tensor(mine, dtype=torch.float32, device=accelerator.device)
        count, tokens, repeated = accelerator.reduce(sums, "sum").tolist()
        if count:
            self._trainer.record("completions/repeated_ratio", repeated / count)
        if self._trainer.model.training:
            self._texts = (tokens / count, repeated / count) if count else None

    def note_loss(self, named: Mapping[str, float]) -> None:
        """Adds the sums of a micro-batch, over all processes, to those of its step."""
        self._sums.update(named)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        signs = self._end_step()
        for name in signs.keys() - self._warned:
            logger.warning(f"Step {state.global_step} shows a collapse: {signs[name]}.")
            self._warned.add(name)
        if signs and self._stops:
            saves = args.save_strategy != "no"
            best = self._best()
            logger.warning(
                f"`collapse_guard='stop'`: the training ends at step {state.global_step}"
                f"{', which is saved; no checkpoint is deleted for it' if saves else ''}."
                f"{'' if best is None else f' The best checkpoint by evaluation is {best}.'}"
            )
            control.should_training_stop = self._has_stopped = True
            control.should_save = saves
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._has_stopped:  # saved already
            control.should_save = control.should_evaluate = False

    def _end_step(self) -> dict[str, str]:
        """The signs of a collapse by name, after the step was added to the course."""
        sums, self._sums = self._sums, Counter()
        if not sums["weight"] or self._texts is None:  # skipped, or no completion of the student's
            return {}
        length, repeated = self._texts
        means = {name: sums[name] / sums["weight"] for name in ("divergence", "student_entropy", "teacher_entropy")}
        self.course.add(Figures(**means, length=length, repeated=repeated))
        self._trainer.record("completions/length_drift", self.course.drift)
        return self.course.signs(clipped=self._trainer.args.clips_entries) if self._watches else {}

    # ---- Checkpoints -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes the course into a checkpoint; called by one process."""
        (Path(folder) / FILE).write_text(json.dumps(self.course.state(), allow_nan=False), encoding="utf-8")

    def load(self, folder: str) -> None:
        """Continues the course of a checkpoint, if it has one."""
        if (path := Path(folder) / FILE).exists():
            self.course = Course.of(json.loads(path.read_text(encoding="utf-8")))

    def kept(self, run_dir: Path) -> Collection[Path]:
        """Checkpoints that `save_total_limit` does not delete: the best; after a collapse, all."""
        if self._has_stopped:
            return list(run_dir.glob("checkpoint-*"))  # which of them is still sound is not known
        best = self._best() if self._watches else self._trainer.state.best_model_checkpoint
        return [] if best is None else [Path(best)]

    def _best(self) -> Path | None:
        """The best checkpoint by `metric_for_best_model`, or else by the mean loss of the evaluations."""
        state = self._trainer.state
        if state.best_model_checkpoint:
            return Path(state.best_model_checkpoint)
        return best_evaluated(Path(self._trainer.args.output_dir), state.log_history)
