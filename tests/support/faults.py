"""Injects a fault into one of several processes: into its teacher, student or gradient, or a phase of its training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import fsdp_on_cpu, tiny
from torch import Tensor
from transformers import TrainerCallback

from trl_opsd import FixedRollout, OPSDTrainer
from trl_opsd._compat.sharding import is_split, trained_parameters

RANK = 1
"""The process that breaks."""
STEP = 2
"""The optimizer step, counted from 1, in which it breaks."""


def make_trainer(folder: Path, teacher: Any, **options: Any) -> OPSDTrainer:
    """Two micro-steps of one row for each process; the student is loaded here, so that ZeRO-3 may split it."""
    words = tiny.tokenizer()
    args = tiny.config(folder / "out", per_device_train_batch_size=1, gradient_accumulation_steps=2, **options)
    fsdp_on_cpu.allow()
    return OPSDTrainer(
        model=str(folder / "student"),
        teacher_model=teacher,
        args=args,
        train_dataset=tiny.rows(),
        processing_class=words,
        rollout=FixedRollout(tiny.recorded(words)),
    )


def must_break(trainer: OPSDTrainer, steps: tuple[int, ...] = (STEP,), rank: int = RANK) -> bool:
    """Whether this is the process and the step to break."""
    return trainer.accelerator.process_index == rank and trainer.state.global_step + 1 in steps


def poison(trainer: OPSDTrainer, side: str, steps: tuple[int, ...] = (STEP,), rank: int = RANK) -> list[float]:
    """Makes the teacher's states, the student's, or the gradient of the loss NaN; returns a growing list of the times.

    The side `"divergence"` gets an infinite sum with a finite gradient, which no check of gradients would find;
    `"empty"` is a step without a token that counts.
    """
    compare, weigh, times = trainer.compare, trainer.weigh, []
    if side == "empty":  # in all processes
        trainer.weigh = lambda *given: weigh(*given) * (trainer.state.global_step + 1 not in steps)
        return times

    def spoiled(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output * float("nan")

    def poisoned(student: Any, rollout: Any, targets: Any, num_items: Any) -> Any:
        if not must_break(trainer, steps, rank):
            return compare(student, rollout, targets, num_items)
        times.append(time.time())
        if side == "teacher":
            targets.hidden[0, 0, 0] = float("nan")
        norms = [module for name, module in student.named_modules() if name.endswith("model.norm")]
        handle = norms[0].register_forward_hook(spoiled) if side == "student" else None
        parts = compare(student, rollout, targets, num_items)
        if handle is not None:
            handle.remove()
        if side == "gradient":
            parts.loss.register_hook(lambda gradient: gradient * float("nan"))
        infinite = torch.tensor([float("inf") if name == side else 0.0 for name in parts.ROW_NAMES])
        return replace(parts, rows=parts.rows + infinite)

    trainer.compare = poisoned
    return times


def fail_in(trainer: OPSDTrainer, phase: str) -> None:
    """Raises in one phase of one process, after printing the time to stderr."""
    owner, name = {
        "complete": (trainer.rollout, "complete"),
        "teach": (trainer, "teach"),
        "compare": (trainer, "compare"),
        "save": (trainer, "_save_optimizer_and_scheduler"),
    }[phase]
    act: Callable[..., Any] = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        # A checkpoint is saved after its step.
        if must_break(trainer, (STEP - 1, STEP) if phase == "save" else (STEP,)):
            print(f"\nRAISES {time.time()}", file=sys.stderr, flush=True)
            raise RuntimeError(f"injected into {phase}")
        return act(*args, **kwargs)

    setattr(owner, name, failing)


def hang(trainer: OPSDTrainer) -> None:
    """Makes one process hang in a rollout, after printing the time to stderr."""
    complete = trainer.rollout.complete

    def hanging(*args: Any, **kwargs: Any) -> Any:
        if must_break(trainer):
            print(f"\nHANGS {time.time()}", file=sys.stderr, flush=True)
            time.sleep(3600)
        return complete(*args, **kwargs)

    trainer.rollout.complete = hanging


class Watching(TrainerCallback):
    """Keeps the weights of this process, whole or its shards, from before each step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.before: dict[int, list[Tensor]] = {}

    def now(self) -> list[Tensor]:
        """The current weights."""
        # FSDP2 may have left some gathered, after a forward that raised.
        shares = (getattr(one, "ds_tensor", one) for one in trained_parameters(self._model).values())
        return [getattr(one, "to_local", lambda one=one: one)().detach().clone() for one in shares]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before[state.global_step + 1] = self.now()


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether all are bitwise equal."""
    return all(map(torch.equal, some, others))


def trained_with_nan(folder: Path, teacher: Any, side: str, **options: Any) -> dict[str, Any]:
    """Results of this process in a training in which one process had a NaN in one step."""
    trainer = make_trainer(folder, teacher, **options)
    watching, times, error = Watching(trainer.model), poison(trainer, side), ""
    trainer.add_callback(watching)
    try:
        trainer.train()
    except FloatingPointError as caught:
        error = str(caught)
    ended = time.time()
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    after = watching.before.get(STEP + 1, watching.now())
    return {
        "processes": trainer.accelerator.num_processes,
        "split": any(map(is_split, trained_parameters(trainer.model).values())),
        "error": error,
        "poisoned": times[:1],
        "ended": ended,
        "steps": trainer.state.global_step,
        "unchanged": same(watching.before[STEP], after),
        "learned_before": not same(watching.before[1], watching.before[STEP]),
        "learned_after": not same(after, watching.now()),
        "skipped": [entry.get("nonfinite/skipped_steps") for entry in logs],
        "losses": ["loss" in entry for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
    }
