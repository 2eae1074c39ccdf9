"""A step with `bf16=True`: the dtype each phase multiplies in, and how often the host waits for the device."""

from __future__ import annotations

import argparse
import tempfile

import bf16
import torch
from support import device_waits, tiny

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
    device = torch.device(found.device)
    watch, number = device_waits.watch_on(device), torch.ones(1, device=device)
    with watch.active():
        watch.start()
        number.item()
        found.at_least("a wait on purpose is seen", len(watch.stop()), 1)
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": not found.on_gpu, "bf16": True, "max_steps": 3, "gradient_accumulation_steps": 2}
        trainer = OPSDTrainer(
            model=tiny.qwen2(32, seed=0),
            teacher_model=tiny.qwen2(48, seed=1),
            args=tiny.config(folder, **options, max_completion_length=6),
            train_dataset=tiny.rows(),
            processing_class=tiny.tokenizer(),
            rollout=HFRollout(),
        )
        each = device_waits.of_each_micro_batch(trainer)
    found.equal("micro-batches watched for waits", len(each), 6)
    for waited in each[2:]:  # the first step compiles the kernel and looks at the first gradient
        found.at_most(f"waits between forward and backward: {', '.join(waited) or 'none'}", len(waited), 1)
