"""Whole optimizer steps: against TRL's on the same completions, and continued from a checkpoint."""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import teacher as benchmark
import torch
from common import settled
from datasets import Dataset
from support import tiny
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from gpu_checks.findings import Findings
from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer
from trl_opsd.loop.step_stats import PhaseClock

STEPS = 5
PEAK = 1.1
"""Of TRL's. Of 12 GB, tiles of 1.5 % of the GPU's memory may be 0.4 GB more than TRL's: 1.03."""


# ---- Against TRL ----------------------------------------------------------------------------------------------------


class Peaks:
    """The largest number of bytes allocated on the GPU in each phase, without phases nested inside it."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self._inside = ["optimizer"]

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.note()
        self._inside.append(phase)
        try:
            yield
        finally:
            self.note()
            self._inside.pop()

    def note(self) -> None:
        if torch.accelerator.is_available():
            phase = self._inside[-1]
            self.bytes[phase] = max(self.bytes[phase], torch.accelerator.max_memory_allocated())
            torch.accelerator.reset_peak_memory_stats()


class Stopwatch(TrainerCallback):
    """The seconds of each optimizer step, until the device is done; phases count from the second step on."""

    def __init__(self, clock: PhaseClock) -> None:
        self.seconds: list[float] = []
        self._clock, self._start = clock, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = settled()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(settled() - self._start)
        if len(self.seconds) == 1:
            self._clock.seconds.clear()  # kernels were compiled


class Phased(DistillationTrainer):
    """Either trainer, with seconds and peak of "batch" (completions, and our teacher) and "learn" (the rest)."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.peaks = Peaks()
        self.clock = PhaseClock(self.peaks, now=settled)
        self.stopwatch = Stopwatch(self.clock)
        self.add_callback(self.stopwatch)
        result = super().train(*args, **kwargs)
        self.peaks.note()
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock("learn"):
            return super().training_step(*args, **kwargs)


class Ours(Phased, OPSDTrainer):
    """Ours."""

    def score(self, rows: Any) -> Any:
        with self.clock("batch"):
            return super().score(rows)


class Trls(Phased):
    """TRL's, with recorded completions."""

    recorded: FixedRollout

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.clock("batch"):
            return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids: Any, *_: Any) -> Any:
        return self.recorded.complete(prompt_ids, 0)


def steps(found: Findings) -> None:
    """A 0.5B student and a 1.5B teacher, both full; float32 for the losses, bfloat16 weights for the speed."""
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ours, trls = (_trained(kind, dtype, found) for kind in (Ours, Trls))
        gap = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], trls["losses"], strict=True))
        found.equal(f"{name}: steps taken", (len(ours["losses"]), len(trls["losses"])), (STEPS, STEPS))
        moved = max(trls["losses"]) - min(trls["losses"])
        found.at_least(f"{name}: the loss moves by", moved, 1e-4, "nats")
        if dtype == torch.float32:
            found.at_most(f"{name}: difference of the losses, relative to TRL's", gap, 1e-4)
        else:
            found.note(f"{name}: difference of the losses, relative to TRL's", gap)
        ratio = trls["step"] / ours["step"]
        found.at_least(f"{name}: speed of a step over TRL's", ratio, 1.0, "x", only_gpu=True)
        for program, one in (("ours", ours), ("TRL's", trls)):
            found.note(f"{name}, {program}: time of a step", 1e3 * one["step"], "ms")
            found.note(f"{name}, {program}: completion tokens per second", one["tokens"] / one["step"])
            for phase, seconds in one["phases"].items():
                found.note(f"{name}, {program}: time of {phase}", 1e3 * seconds / (STEPS - 1), "ms")
            for phase, peak in one["peaks"].items():
                found.note(f"{name}, {program}: peak of {phase}", peak / 1e9, "GB")
        if found.on_gpu:
            over = max(ours["peaks"].values()) / max(trls["peaks"].values())
            found.at_most(f"{name}: peak of a step over TRL's", over, PEAK, only_gpu=True)
    if not found.on_gpu:
        found.skip("peaks", "they are counted by the GPU's allocator; benchmarks/loss.py has those of the loss")


def _trained(kind: type[Phased], dtype: torch.dtype, found: Findings) -> dict[str, Any]:
    rows, tokens = (8, 512) if found.full else (2, 12)
    dataset, completions = _recorded(rows, tokens)
    before = torch.accelerator.memory_allocated() if found.on_gpu else 0
    with tempfile.TemporaryDirectory() as folder:
        options = tiny.options(folder, per_device_train_batch_size=rows, max_steps=STEPS, max_completion_length=tokens)
        options |= {"use_cpu": not found.on_gpu, "learning_rate": 5e-5}
        given: dict[str, Any] = {
            "model": _model("0.5B", dtype, found).requires_grad_().train(),
            "teacher_model": _model("1.5B", dtype, found),
            "train_dataset": dataset,
            "processing_class": tiny.tokenizer(),
        }
        if kind is Ours:
            trainer = kind(args=OPSDConfig(**options), rollout=FixedRollout(completions), **given)
        else:
            trainer = kind(args=DistillationConfig(**options), **given)
            trainer.recorded = FixedRollout(completions)
        trainer.train()
    result = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step": statistics.median(trainer.stopwatch.seconds[1:]),
        "tokens": sum(map(len, completions.values())),
        "phases": dict(trainer.clock.seconds),
        "peaks": {phase: peak - before for phase, peak in trainer.peaks.bytes.items()},
    }
    del trainer, given
    gc.collect()
    if found.on_gpu:
        torch.accelerator.empty_cache()
    return result


def _model(shape: str, dtype: torch.dtype, found: Findings) -> Any:
    layers, shape = (None, shape) if found.full else ({"0.5B": 1, "1.5B": 2}[shape], "small")
    device = torch.device(found.device)
    return benchmark.make_model(argparse.Namespace(model=shape, layers=layers, length=1024, dtype=dtype, device=device))


def _recorded(rows: int, tokens: int) -> tuple[Dataset, dict[tuple[int, ...], list[int]]]:
    """Distinct prompts, and completions from an eighth of the longest to the longest."""
    generator = torch.Generator().manual_seed(0)
    prompts = [f"Question {row}: what is {row} times {row}?" for row in range(rows)]
    lengths = torch.linspace(tokens / 8, tokens, rows).int().tolist()
    ids = tiny.tokenizer()(prompts)["input_ids"]
    written = [torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"prompt": prompts}), dict(zip(map(tuple, ids), written, strict=True))


# ---- From a checkpoint ----------------------------------------------------------------------------------------------


class Witnessed(OPSDTrainer):
    """Keeps the completions of training, by step."""

    def complete(self, prompt_ids: Any) -> Any:
        completions = super().complete(prompt_ids)
        self.__dict__.setdefault("written", {})[self.state.global_step] = completions
        return completions


def resume(found: Findings) -> None:
    """Sampled rollouts and Adam: the second half of a run has the tokens and the weights of the whole one."""
    width = 512 if found.full else 32
    with tempfile.TemporaryDirectory() as folder:
        whole = _sampling_trainer(found, width, folder)
        whole.train()
        continued = _sampling_trainer(found, width, folder)
        checkpoint = Path(folder) / "checkpoint-2"
        continued.train(resume_from_checkpoint=str(checkpoint))
        pairs = list(zip(whole.model.parameters(), continued.model.parameters(), strict=True))
    found.equal("steps that were continued", sorted(continued.written), [2, 3])
    same = all(continued.written[step] == whole.written[step] for step in (2, 3))
    found.equal("sampled completions equal to those of the whole run", same, True)
    gap = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    found.at_most("difference of the weights, after two steps of about 1e-4", gap, 1e-5)
    gaps = [abs(a - b) for a, b in zip(_losses(whole)[2:], _losses(continued)[-2:], strict=True)]
    found.at_most("difference of the losses", max(gaps), 1e-4, "nats")


def _sampling_trainer(found: Findings, width: int, folder: str) -> Witnessed:
    options = {"use_cpu": not found.on_gpu, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    return Witnessed(
        model=tiny.qwen2(width, seed=0),
        teacher_model=tiny.qwen2(width + 64, seed=1),
        args=tiny.config(folder, **options),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        rollout=HFRollout(),
    )


def _losses(trainer: OPSDTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
