"""Shows a training on the console: a bar with the current phase, and a row of figures for each log."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler

PHASES = {"complete": "generate", "teach": "score", "compare": "train"} | {
    one: one for one in ("sync", "reward", "save")
}
"""Displayed names of the phases: in rows, on bars, in a dry run, in a report."""


_COLUMNS = {
    "divergence": ("divergence/mean", 10, "#.4g"),
    "KL": ("certificate/kl", 8, "#.3g"),
    "agree": ("certificate/agreement", 5, ".1%"),
    "accept": ("acceptance", 6, ".1%"),
    "reward": ("reward", 6, ".3f"),
    "length": ("completions/mean_length", 6, ".1f"),
    "tokens/s": ("tokens_per_second", 8, ",.0f"),
    "s/step": ("step_time", 6, ".2f"),
    "gen": ("time/complete", 5, ".2f"),
    "score": ("time/teach", 5, ".2f"),
    "train": ("time/compare", 5, ".2f"),
    "GiB": ("peak", 3, ".1f"),
}
"""By title: name in a log, width, and format."""
_LABEL = 8


class Rows:
    """Turns logs into rows of a table; a row is preceded by the header where a column is new.

    Example:

    ```python
    >>> rows = Rows(peak=lambda: 2.0 * 2**30)
    >>> for line in rows.of({"loss": 0.3, "divergence/mean": 0.25, "step_time": 0.5}, 20, 320):
    ...     print(line)
        step  divergence  s/step  GiB
      20/320      0.2500    0.50  2.0

    ```
    """

    def __init__(self, peak: Callable[[], float] | None = None) -> None:
        self._peak = peak or peak_bytes
        self._shown: set[str] = set()
        self.start = 0
        """Optimizer steps that a resumed training begins after."""

    def of(self, logs: Mapping[str, Any], step: int, steps: int) -> list[str]:
        """The lines for a log of a training, of an evaluation, or at the end."""
        if "train_runtime" in logs:
            return [f"{step - self.start} steps in {in_words(logs['train_runtime'])}"]
        prefix = evaluated(logs)
        start, label = (f"{prefix}_", prefix) if prefix else ("", f"{step}/{steps}")
        values = {name.removeprefix(start): one for name, one in logs.items() if name.startswith(start)}
        values |= {} if prefix else {"peak": self._peak() / 2**30}
        shown = {title: (values.get(name), form) for title, (name, _, form) in _COLUMNS.items()}
        cells = {title: format(value, form) for title, (value, form) in shown.items() if value is not None}
        new = cells.keys() - self._shown
        self._shown |= new
        header = [self._line("step", {title: title for title in self._shown})] if new else []
        return [*header, self._line(label, cells)]

    def _line(self, label: str, cells: Mapping[str, str]) -> str:
        widths = {title: width for title, (_, width, _) in _COLUMNS.items() if title in self._shown}
        shown = [f"{cells.get(title, ''):>{width}}" for title, width in widths.items()]
        return "  ".join([f"{label:>{_LABEL}}", *shown]).rstrip()


def evaluated(logs: Mapping[str, Any]) -> str | None:
    """The prefix of an evaluation's metrics; `None` for a log of a training, or its summary."""
    runtimes = (name for name in logs if name.endswith("_runtime") and name != "train_runtime")
    return next((name.removesuffix("_runtime") for name in runtimes), None)


def in_words(seconds: float) -> str:
    """A duration: "7.2 s", "2 min 27 s" or "2 h 30 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def peak_bytes() -> float:
    """Peak memory of this process: of the accelerator, else of the host."""
    if torch.accelerator.is_available():
        with suppress(RuntimeError):  # not every accelerator counts it: "Allocator for mps is not a DeviceAllocator"
            return float(torch.accelerator.max_memory_allocated())
    # KiB on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Progress(ProgressCallback):
    """A bar with the current phase, where there is a terminal or a notebook, and the rows.

    A subclass of transformers' own, so that what removes that one removes this one.
    """

    training_bar: Any
    prediction_bar: Any
    is_hidden: bool | None = None
    """Whether there is no bar; `None` where the output is no terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = Rows()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Creates the bar, in the main process."""
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=self.is_hidden, unit="step")
        self.current_step, self._rows.start = 0, state.global_step

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Creates or advances the bar of an evaluation, in the main process."""
        if not self.is_hidden and sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Prints the rows of a log above the bar."""
        if state.is_world_process_zero:
            for line in self._rows.of(logs or {}, state.global_step, state.max_steps):
                tqdm.write(line)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Shows the name of a phase beside the bar within the context."""
        if self.training_bar is None:
            yield
            return
        self.training_bar.set_postfix_str(PHASES.get(phase, phase))
        try:
            yield
        finally:
            self.training_bar.set_postfix_str("", refresh=False)


class _Printed(Progress, PrinterCallback):
    """The rows without a bar, for `disable_tqdm=True`."""

    is_hidden = True


def replace_default(handler: CallbackHandler) -> Callable[[str], AbstractContextManager[None]] | None:
    """Replaces transformers' default in a new trainer by [`Progress`], or by the rows alone; returns its `during`."""
    # From the end: the default was added last, and a user may have passed the same class, which stays.
    for place in reversed(range(len(handler.callbacks))):
        kind = type(handler.callbacks[place])
        if kind in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            handler.callbacks[place] = shown = _Printed() if kind is PrinterCallback else Progress()
            return None if shown.is_hidden else shown.during
    return None
