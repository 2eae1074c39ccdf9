"""A run of one step that leaves nothing behind, and a summary of it; `--dry_run` of a training script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_opsd.config import OPSDConfig
from trl_opsd.monitor.progress import PHASES
from trl_opsd.trainer import OPSDTrainer


@contextmanager
def dry(config: OPSDConfig) -> Iterator[DryRun]:
    """Changes the options, before the trainer is built, so that a run of one step leaves nothing behind."""
    with TemporaryDirectory(prefix="trl_opsd-dry-run-") as folder:
        config.output_dir, config.report_to, config.push_to_hub = folder, [], False
        config.eval_on_start = False
        yield DryRun()


@dataclass(frozen=True, slots=True)
class DryRun:
    """One generation batch and one optimizer step of a trainer that passed every check when it was built."""

    def of(self, trainer: OPSDTrainer) -> None:
        """Runs the step and prints a summary, in the main process. Collective."""
        trainer.add_callback(_OneStep())
        trainer.train()
        if trainer.accelerator.is_main_process:
            print(in_words(trainer.state.log_history[0], trainer.state.max_steps))


class _OneStep(TrainerCallback):
    """Ends a training after its first optimizer step, without evaluating or saving."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_training_stop, control.should_log = True, True
        control.should_save = control.should_evaluate = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save = control.should_evaluate = False


def in_words(logged: Mapping[str, float], steps: int) -> str:
    """A summary of the first step's log; `steps` are those of the whole run."""
    seconds = {name: logged[f"time/{name}"] for name in PHASES if f"time/{name}" in logged}
    whole = sum(seconds.values())
    parts = ", ".join(f"{PHASES[name]} {value:.2f} s" for name, value in seconds.items())
    lines = ["Dry run: one generation batch and one optimizer step went through; nothing was saved."]
    if "divergence/mean" in logged:
        lines.append(
            f"  divergence    {logged['divergence/mean']:.4g} nats per token; entropy of the student "
            f"{logged['entropy/student']:.3g}, of the teacher {logged['entropy/teacher']:.3g}"
        )
    else:
        lines.append("  divergence    none: no token counted in the loss")
    lines += [
        f"  completions   {logged['completions/mean_length']:.0f} tokens on average, from "
        f"{logged['completions/min_length']:.0f} to {logged['completions/max_length']:.0f}; "
        f"{logged['completions/clipped_ratio']:.0%} were cut at the limit",
        f"  step          loss {logged['loss']:.4g}, gradient norm {logged['grad_norm']:.3g}, learning rate "
        f"{logged['learning_rate']:.3g}{'' if logged['learning_rate'] else ', with which a warm-up begins'}",
        f"  seconds       {parts}",
        f"  the whole run {steps} steps; at this pace {_duration(whole * steps)}, without evaluations and checkpoints",
    ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"
