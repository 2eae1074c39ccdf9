"""A step with `bf16=True`: the dtype each phase multiplies in, and how often the host waits for the device."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import bf16
import torch
from support import tiny

from gpu_checks.findings import Findings
from trl_opsd import HFRollout, OPSDTrainer


def precision(found: Findings) -> None:
    width, layers, vocab, rows, tokens = (576, 6, 49152, 4, 128) if found.full else (64, 1, 320, 2, 4)
    shape = {"width": width, "layers": layers, "vocab": vocab, "rows": rows, "tokens": tokens, "prompt_tokens": 16}
    measured = bf16.measure(argparse.Namespace(**shape, repeats=3, float32=False, device=found.device))
    for phase in ("teach", "student", "loss", "backward"):
        found.equal(f"dtypes of the products, {phase}", measured["dtypes"].get(phase), ["bfloat16"])
    for phase, seconds in measured["seconds"].items():
        found.note(f"time of the phase {phase}", 1e3 * seconds, "ms")
    _waits(found)


def _waits(found: Findings) -> None:
    """On other devices `tests/device/test_simulated.py` counts them, on a simulated one."""
    device = torch.device(found.device)
    if device.type != "cuda":
        found.skip("waits in forward and backward passes", "torch warns of them with CUDA only")
        return
    watch, number = Waits(), torch.ones(1, device=device)
    with watch.active():
        watch.start()
        number.item()
        found.at_least("a wait on purpose is seen", len(watch.stop()), 1)
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": False, "bf16": True, "max_steps": 3, "gradient_accumulation_steps": 2}
        trainer = OPSDTrainer(
            model=tiny.qwen2(32, seed=0),
            teacher_model=tiny.qwen2(48, seed=1),
            args=tiny.config(folder, **options, max_completion_length=6),
            train_dataset=tiny.rows(),
            processing_class=tiny.tokenizer(),
            rollout=HFRollout(),
        )
        each = waits_of_each_micro_batch(trainer)
    found.equal("micro-batches watched for waits", len(each), 6)
    for number, waited in enumerate(each[2:]):  # the first step compiles the kernel and looks at the first gradient
        # transformers looks for packed rows, and the second and last micro-batch of a step reads its sums
        what = f"waits in the passes of micro-batch {number % 2}: {', '.join(waited) or 'none'}"
        found.at_most(what, len(waited), 1 + number % 2)


def waits_of_each_micro_batch(trainer: OPSDTrainer) -> list[list[str]]:
    """Trains, and returns what the host waits for in each of the student's forward passes and its backward pass."""
    watch, each, backward = Waits(), list[list[str]](), trainer.accelerator.backward

    def backward_and_stop(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        each.append(watch.stop())

    def start(*_: Any) -> None:
        if trainer.model.training:
            watch.start()

    hook = trainer.model.get_decoder().register_forward_pre_hook(start)
    try:
        with watch.active(), patch.object(trainer.accelerator, "backward", backward_and_stop):
            trainer.train()
    finally:
        hook.remove()
    return each


class Waits:
    """The waits that CUDA's operations warn of, while it is on."""

    def __init__(self) -> None:
        self._caught: list[Any] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as self._caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def start(self) -> None:
        self._caught.clear()
        torch.cuda.set_sync_debug_mode("warn")

    def stop(self) -> list[str]:
        torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in self._caught if "called a synchronizing" in str(one.message)]
        return [f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in waits]
