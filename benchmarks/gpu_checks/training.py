"""Whole optimizer steps: against TRL's on the same completions, compiled, and continued from a checkpoint."""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any

import teacher as benchmark
import torch
from common import settled
from datasets import Dataset
from support import tiny
from support.witnessed_run import Watched, Witness
from timing import busy
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from gpu_checks.findings import Findings
from trl_opsd import FixedRollout, HFRollout, OPSDConfig, OPSDTrainer

STEPS = 5
"""The first compiles kernels, and the last is watched; the time of a step is the median of those between."""
WHAT = {"step": "a step", "busy": "a step in which the GPU computes", "scoring": "a step in which the teacher scores"}
GAPS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest difference of the losses of two programs, relative to them."""
GRAPHS = 3
"""Of each kind of layer, whatever the lengths of rows are."""
PEAK = 1.1
"""Of TRL's. Of 12 GB, tiles of 1.5 % of the GPU's memory may be 0.4 GB more than TRL's: 1.03."""


# ---- Against TRL ----------------------------------------------------------------------------------------------------


class Stopwatch(TrainerCallback):
    """Seconds of each optimizer step, until the device is done, and how long the GPU computes in the last one."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.busy: float | None = None
        self._start, self._profiler = 0.0, profile(activities=[ProfilerActivity.CUDA])

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._last = torch.cuda.is_available() and state.global_step + 1 == args.max_steps
        if self._last:
            self._profiler.__enter__()
        self._start = settled()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(settled() - self._start)
        if self._last:
            self._profiler.__exit__(None, None, None)
            self.busy = busy(self._profiler)


class Ours(OPSDTrainer):
    """Ours, with the seconds in which the teacher scores, of each time that it does."""

    def score(self, rows: Any) -> Any:
        start, found = settled(), super().score(rows)
        self.__dict__.setdefault("scoring", []).append(settled() - start)
        return found


class Trls(DistillationTrainer):
    """TRL's, with recorded completions."""

    recorded: FixedRollout

    def _generate_single_turn(self, prompt_ids: Any, *_: Any) -> Any:
        return self.recorded.complete(prompt_ids, 0)


def steps(found: Findings) -> None:
    """A 0.5B student and a 1.5B teacher, both full; float32 for the losses, bfloat16 weights for the speed."""
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ours, trls = (_trained(kind, dtype, found) for kind in (Ours, Trls))
        found.equal(f"{name}: steps taken", (len(ours["losses"]), len(trls["losses"])), (STEPS, STEPS))
        found.at_least(f"{name}: the loss moves by", max(trls["losses"]) - min(trls["losses"]), 1e-4, "nats")
        found.at_most(f"{name}: difference of the losses, relative to TRL's", _gap(ours, trls), GAPS[dtype])
        _compare(name, {"ours": ours, "TRL's": trls}, found)
        if found.on_gpu:
            found.at_most(f"{name}: peak of a step over TRL's", ours["peak"] / trls["peak"], PEAK, only_gpu=True)
    if not found.on_gpu:
        found.skip("peaks", "they are counted by the GPU's allocator; benchmarks/loss.py has those of the loss")


def compiled(found: Findings) -> None:
    """The same steps with the decoder layers of both models compiled, and with eager ones."""
    layers, eager = (_trained(Ours, torch.bfloat16, found, torch_compile=compiles) for compiles in (True, False))
    found.at_most("graphs of the layers of both models", layers["graphs"], 2 * GRAPHS)
    found.note("added to building and training, for compiling", layers["all"] - eager["all"], "s")
    found.at_most("difference of the losses, relative to eager ones", _gap(layers, eager), GAPS[torch.bfloat16])
    found.note("speed of the teacher, compiled over eager", eager["scoring"] / layers["scoring"], "x")
    _compare("bfloat16", {"compiled": layers, "eager": eager}, found)


def _gap(some: dict[str, Any], others: dict[str, Any]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(some["losses"], others["losses"], strict=True))


def _compare(name: str, programs: dict[str, dict[str, Any]], found: Findings) -> None:
    """Notes times and peaks of two programs; the first may not be slower than the second."""
    (first, one), (second, other) = programs.items()
    ratio = other["step"] / one["step"]
    found.at_least(f"{name}: speed of a step, {first} over {second}", ratio, 1.0, "x", only_gpu=True)
    for program, its in programs.items():
        found.note(f"{name}, {program}: completion tokens per second", its["tokens"] / its["step"])
        for what in ("step", "busy", "scoring"):
            if its[what] is not None:
                found.note(f"{name}, {program}: time of {WHAT[what]}", 1e3 * its[what], "ms")
        if found.on_gpu:
            found.note(f"{name}, {program}: peak of a step", its["peak"] / 1e9, "GB")


def _trained(kind: type[Ours] | type[Trls], dtype: torch.dtype, found: Findings, **more: Any) -> dict[str, Any]:
    """Trains with one trainer: 16 rows a step with bfloat16 weights, and fewer with float32, which takes longer."""
    rows, micro, tokens = (16, 4, 2048) if dtype == torch.bfloat16 else (8, 8, 512)
    rows, micro, tokens = (rows, micro, tokens) if found.full else (2, micro // 4, 12)
    dataset, completions = _recorded(rows, tokens)
    options = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro}
    options |= {"use_cpu": not found.on_gpu, "learning_rate": 5e-5}
    options |= {"max_steps": STEPS, "max_completion_length": tokens}
    graphs, watch = counters["stats"]["unique_graphs"], Stopwatch()
    if found.on_gpu:
        torch.accelerator.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {
            "model": _model("0.5B", dtype, found).requires_grad_().train(),
            "teacher_model": _model("1.5B", dtype, found),
            "train_dataset": dataset,
            "processing_class": tiny.tokenizer(),
            "callbacks": [watch],
        }
        start = settled()
        if kind is Ours:
            args = OPSDConfig(**tiny.options(folder, **options, **more))
            trainer = kind(args=args, rollout=FixedRollout(completions), **given)
        else:
            trainer = kind(args=DistillationConfig(**tiny.options(folder, **options)), **given)
            trainer.recorded = FixedRollout(completions)
        trainer.train()
    scoring = getattr(trainer, "scoring", None)
    result = {
        "losses": tiny.logged(trainer, "loss"),
        "all": settled() - start,
        "step": statistics.median(watch.steps[1:-1]),
        "busy": watch.busy,
        "scoring": scoring and statistics.median(scoring[1:-1]),
        "graphs": counters["stats"]["unique_graphs"] - graphs,
        "tokens": sum(map(len, completions.values())),
        "peak": torch.accelerator.max_memory_allocated() if found.on_gpu else None,
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


def resume(found: Findings) -> None:
    """Sampled rollouts and Adam: the second half of a run has the tokens and the weights of the whole one."""
    with tempfile.TemporaryDirectory() as folder:
        whole, continued = _sampling_trainer(found, folder), _sampling_trainer(found, folder)
        whole.train()
        continued.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    runs = whole.witness, continued.witness
    found.equal("steps that were continued", len(runs[1].written), 2)
    same = runs[0].written[2:] == runs[1].written
    found.equal("sampled completions equal to those of the whole run", same, True)
    gap = float((tiny.weights(whole) - tiny.weights(continued)).abs().max())
    found.at_most("difference of the weights, after two steps of about 1e-4", gap, 1e-5)
    gap = max(abs(a - b) for a, b in zip(runs[0].losses[2:], runs[1].losses, strict=True))
    found.at_most("difference of the losses", gap, 1e-4, "nats")


def _sampling_trainer(found: Findings, folder: str) -> Watched:
    width = 512 if found.full else 32
    options = {"use_cpu": not found.on_gpu, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = Watched(
        model=tiny.qwen2(width, seed=0),
        teacher_model=tiny.qwen2(width + 64, seed=1),
        args=tiny.config(folder, **options),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        rollout=HFRollout(),
    )
    trainer.witness = Witness()
    return trainer
