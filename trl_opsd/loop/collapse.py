"""Watches a training for a collapse, and warns or stops; `monitor/course.py` knows the signs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from accelerate.logging import get_logger
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd._compat.strict_json import loads
from trl_opsd.checkpoints.checkpoint import best_evaluated
from trl_opsd.config import OPSDConfig
from trl_opsd.monitor.course import Course, Figures, is_repetition

__all__ = ["SEAMS", "CollapseGuard", "Courses"]

SEAMS: dict[str, tuple[str, ...]] = {
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}
"""Overridden methods of transformers' trainer, with their parameters; a test compares them with the installed ones."""

FILE = "opsd_course.json"
"""File of a checkpoint with the figures of the first and the last steps."""

logger = get_logger(__name__)


@final
class CollapseGuard(TrainerCallback):
    """Ends each step of a course, and warns once of each sign of a collapse, or stops and saves.

    `end_step` adds the step to the course and returns the signs by name; every process has the same figures, so all
    stop at the same step.
    """

    def __init__(self, end_step: Callable[[], Mapping[str, str]], stops: bool, best: Callable[[], Path | None]) -> None:
        self._end_step, self._stops, self._best = end_step, stops, best
        self._said: set[str] = set()
        self.has_stopped = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._said.clear()
        self.has_stopped = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        signs = self._end_step()
        for name in signs.keys() - self._said:
            logger.warning(f"Step {state.global_step} shows a collapse: {signs[name]}.")
            self._said.add(name)
        if signs and self._stops:
            saves = args.save_strategy != "no"
            best = self._best()
            logger.warning(
                f"`collapse_guard='stop'`: the training ends at step {state.global_step}"
                f"{', which is saved; no checkpoint is deleted for it' if saves else ''}."
                f"{'' if best is None else f' The best checkpoint by evaluation is {best}.'}"
            )
            control.should_training_stop = self.has_stopped = True
            control.should_save = saves
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.has_stopped:  # saved already
            control.should_save = control.should_evaluate = False


class Courses(Trainer):
    """A trainer that compares its steps with its first ones, also after it has resumed."""

    args: OPSDConfig
    accelerator: Any
    model: Any
    record: Callable[[str, float], None]
    save_own_state: Callable[[str], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._course = Course()
        self._step_sums: Counter[str] = Counter()
        self._step_texts: tuple[float, float] | None = None
        self._watches = self.args.collapse_guard is not None
        self._collapse = CollapseGuard(self._end_step, self.args.collapse_guard == "stop", self.best_checkpoint)
        self.add_callback(self._collapse)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As transformers', with an empty course, unless it resumes."""
        self._course, self._step_texts = Course(), None
        self._step_sums.clear()
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def note_completions(self, completions: Sequence[Sequence[int]]) -> None:
        """Records the share of repetitive completions and their mean length, of those that the student generated, over
        all processes; this one may have none. Collective.
        """
        mine = [len(completions), sum(map(len, completions)), sum(map(is_repetition, completions))]
        sums = torch.tensor(mine, dtype=torch.float32, device=self.accelerator.device)
        count, tokens, repeated = self.accelerator.reduce(sums, "sum").tolist()
        if count:
            self.record("completions/repeated_ratio", repeated / count)
        if self.model.training:
            self._step_texts = (tokens / count, repeated / count) if count else None

    def note_loss(self, named: Mapping[str, float]) -> None:
        """Adds the sums of a micro-batch, over all processes, to those of its step."""
        self._step_sums.update(named)

    def _end_step(self) -> dict[str, str]:
        sums, self._step_sums = self._step_sums, Counter()
        if not sums["weight"] or self._step_texts is None:  # skipped, or no completion of the student's
            return {}
        length, repeated = self._step_texts
        means = {name: sums[name] / sums["weight"] for name in ("divergence", "student_entropy", "teacher_entropy")}
        self._course.add(Figures(**means, length=length, repeated=repeated))
        self.record("completions/length_drift", self._course.drift)
        return self._course.signs(clipped=self.args.clips_entries) if self._watches else {}

    # ---- Checkpoints -----------------------------------------------------------------------------------------------

    def save_course(self, folder: str) -> None:
        """Writes what [`load_course`] reads; called by one process."""
        (Path(folder) / FILE).write_text(json.dumps(self._course.state(), allow_nan=False), encoding="utf-8")

    def load_course(self, folder: str) -> None:
        """Continues the course of a checkpoint, if it has one."""
        if (path := Path(folder) / FILE).exists():
            self._course = Course.of(loads(path.read_text(encoding="utf-8")))

    def best_checkpoint(self) -> Path | None:
        """The best by `metric_for_best_model`, or else by the mean loss of the evaluations."""
        if self.state.best_model_checkpoint:
            return Path(self.state.best_model_checkpoint)
        return best_evaluated(Path(self.args.output_dir), self.state.log_history)

    def kept(self, run_dir: Path) -> Collection[Path]:
        """Checkpoints that `save_total_limit` does not delete: the best; after a collapse, all."""
        if self._collapse.has_stopped:
            return list(run_dir.glob("checkpoint-*"))  # which of them is still sound is not known
        best = self.best_checkpoint() if self._watches else self.state.best_model_checkpoint
        return [] if best is None else [Path(best)]
