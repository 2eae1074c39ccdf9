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
from transformers.trainer_callback import CallbackHandler, TrainerState

PHASES = {"complete": "generate", "teach": "score", "compare": "train"} | {n: n for n in ("sync", "reward", "save")}
"""Displayed names of the phases: in rows, on bars, in a dry run, in a report."""


_COLUMNS = {
    "divergence": ("divergence/mean", 10, "#.4g"),
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
HEADER = "  ".join(["    step", *(f"{title:>{width}}" for title, (_, width, _) in _COLUMNS.items())])
"""The titles, above the first row."""


def row_of(logs: Mapping[str, Any], step: int, steps: int) -> str:
    """The row of figures for a log of a training or of an evaluation, below `HEADER`."""
    prefix = evaluated(logs)
    start, label = (f"{prefix}_", prefix) if prefix else ("", f"{step}/{steps}")
    values = {name.removeprefix(start): one for name, one in logs.items() if name.startswith(start)}
    values |= {} if prefix else {"peak": peak_bytes() / 2**30}
    cells = [
        f"{format(values[name], form) if name in values else '':>{width}}" for name, width, form in _COLUMNS.values()
    ]
    return "  ".join([f"{label:>8}", *cells]).rstrip()


def evaluated(logs: Mapping[str, Any]) -> str | None:
    """The prefix of an evaluation's metrics; `None` for a log of a training, or its summary."""
    runtimes = (name for name in logs if name.endswith("_runtime") and name != "train_runtime")
    return next((name.removesuffix("_runtime") for name in runtimes), None)


def ended(args: Any, state: TrainerState, start: int) -> Iterator[str]:
    """What a training that began at step `start` took, taught and wrote, and whether evaluations got worse."""
    log, is_worse = state.log_history, False
    seconds = {title: sum(one.get(f"time/{name}", 0.0) for one in log) for name, title in PHASES.items()}
    total = sum(seconds.values())
    shares = [f"{title} {one / total:.0%}" for title, one in seconds.items() if total and one / total >= 0.005]
    tokens = [f"{one['num_tokens']:,.0f} tokens" for one in log[-3:] if "num_tokens" in one][-1:]
    took = [f"{state.global_step - start} steps in {in_words(log[-1]['train_runtime'])}", *tokens, *shares]
    yield ", ".join([*took, f"peak {peak_bytes() / 2**30:.1f} GiB"])
    for title, better in ("divergence", -1), ("reward", 1):
        name, _, form = _COLUMNS[title]
        said = []
        for logged, where in (name, ""), (f"eval_{name}", " in evaluations"):
            if each := [one[logged] for one in log if logged in one]:
                ends = each[:1] + each[1:][-1:]
                said.append(" → ".join(format(one, form) for one in ends) + where)
                is_worse = better * (each[-1] - each[0]) < -0.05 * abs(each[0]) if where else is_worse
        if said:
            yield f"  {title:<12}{', '.join(said)}"
    if args.report:
        yield f"  {'written':<12}{args.output_dir}/report.html"
    if is_worse:
        yield f"  {'warning':<12}evaluations got worse: docs/troubleshooting.md#accuracy-falls-although-the-loss-falls"


def saved(folder: object, model: Any) -> str:
    """Where a model was saved, and the command that serves it."""
    config = getattr(model, "peft_config", {}).get("default")
    adapter = "" if config is None else f"{config.base_model_name_or_path or 'BASE'} --enable-lora --lora-modules mine="
    return f"  {'saved':<12}{folder}; next: vllm serve {adapter}{folder}"


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


class Progress(ProgressCallback, PrinterCallback):
    """A bar with the current phase, where there is a terminal or a notebook, and the rows.

    A subclass of both of transformers' own, so that what removes one of them removes this one.
    """

    training_bar: Any
    prediction_bar: Any

    def __init__(self, is_hidden: bool | None = None) -> None:
        super().__init__()
        self._is_hidden = is_hidden  # as of tqdm's `disable`: with `None`, where the output is no terminal
        self._start, self._has_header = 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Creates the bar, in the main process."""
        if state.is_world_process_zero:
            self.training_bar = tqdm(total=state.max_steps, dynamic_ncols=True, disable=self._is_hidden, unit="step")
        self.current_step, self._start = 0, state.global_step

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Creates or advances the bar of an evaluation, in the main process."""
        if not self._is_hidden and sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Prints the row of a log above the bar, or how the training has ended."""
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            tqdm.write("\n".join(ended(args, state, self._start)))
            return
        if not self._has_header:
            tqdm.write(HEADER)
        self._has_header = True
        tqdm.write(row_of(logs, state.global_step, state.max_steps))

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


def replace_default(handler: CallbackHandler) -> Callable[[str], AbstractContextManager[None]] | None:
    """Replaces transformers' default in a new trainer by [`Progress`]; returns its `during` where there is a bar."""
    # From the end: the default was added last, and a user may have passed the same class, which stays.
    for place in reversed(range(len(handler.callbacks))):
        kind = type(handler.callbacks[place])
        if kind in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            is_hidden = True if kind is PrinterCallback else None
            handler.callbacks[place] = shown = Progress(is_hidden)
            return None if is_hidden else shown.during
    return None
