"""Logs counts and times of a trainer, and watches each phase for hangs and memory errors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from trl_opsd._compat.trl import DistillationTrainer
from trl_opsd.monitor.accounts import Accounts
from trl_opsd.monitor.memory import explained
from trl_opsd.monitor.metrics import recorded
from trl_opsd.monitor.nonfinite import StepGuard
from trl_opsd.monitor.progress import replace_default
from trl_opsd.parallel.watchdog import Watchdog

__all__ = ["SEAMS", "Logged"]

SEAMS: dict[str, tuple[str, ...]] = {
    "_save_checkpoint": ("self", "model", "trial"),
    "log": ("self", "logs", "start_time"),
}
"""Overridden methods of TRL's trainer, with their parameters; a test compares them with the installed ones."""


class Logged(DistillationTrainer):
    """A trainer that logs means over tokens, and seconds of each phase."""

    footprint: Callable[[str], dict[str, int]]
    _guard: StepGuard

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shown = replace_default(self.callback_handler)
        self._watchdog = Watchdog(self.args.phase_timeout, self.accelerator.process_index)
        self._accounts = {mode: Accounts(self._watched) for mode in ("train", "eval")}

    def record(self, name: str, value: float) -> None:
        """Adds a number of this process to the next log, which shows the mean; in an evaluation, to its metrics.

        Args:
            name (`str`):
                Any that is not logged already.
            value (`float` or `torch.Tensor`):
                One number.

        Raises:
            ValueError: It is not one number, or the name is taken.
        """
        self._metrics[self._mode][name].append(recorded(name, value))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times the body as a phase of training, `time/<name>` in the log, and reports it if it hangs."""
        return self._accounts[self._mode].clock(name)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._accounts["train"].clock("save"):
            super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's; the summary of a training includes what an evaluation left since its last log."""
        # TRL takes the numbers of training or evaluation by the mode of the model.
        was_training, self.model.training = self.model.training, self.model.training or "train_runtime" in logs
        try:
            self._log(logs, start_time)
        finally:
            self.model.training = was_training

    def _log(self, logs: dict[str, float], start_time: float | None) -> None:
        mode = self._mode
        if mode == "train" and (found := self._accounts[mode].metrics(per_batch=True)):
            logs.update(found)
            self._accounts[mode].clear()
        if mode == "train" and "loss" in logs and self._guard.counts:
            logs["nonfinite/skipped_steps"] = self._guard.skipped
        if self.log_completions and self.is_world_process_zero():  # TRL makes the folder at construction
            os.makedirs(os.path.join(self.args.output_dir, "completions"), exist_ok=True)
        for name in [name for name, each in self._metrics[mode].items() if all(map(math.isnan, each))]:
            del self._metrics[mode][name]  # TRL would log `None`, which nothing that shows or stores a log expects
        super().log(logs, start_time)

    @contextmanager
    def _watched(self, phase: str) -> Iterator[None]:
        with explained(phase, partial(self.footprint, phase)), self._watchdog(phase), self._shown(phase):
            yield

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"
