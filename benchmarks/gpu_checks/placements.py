"""A teacher resident, visiting the device whole, and layer by layer: the same targets, and what each takes."""

from __future__ import annotations

import argparse
import statistics

import teacher as benchmark
import torch
from timing import once

from gpu_checks.ceilings import copied_from_host
from gpu_checks.findings import Findings

STREAMED = 1.25
"""The copy of the first of eight layers is hidden by nothing: 1 + 1/8, if each other one is."""


def teacher(found: Findings) -> None:
    """Eight layers of 7B shape, made on the device, read 65,536 tokens in passes long enough to hide a copy."""
    device = torch.device(found.device)
    shape = {"model": "7B", "layers": 8, "rows": 64, "length": 1024, "dtype": torch.bfloat16}
    if not found.full:
        shape = {"model": "small", "layers": 12, "rows": 2, "length": 8, "dtype": torch.float32}
    args = argparse.Namespace(**shape, device=device, pass_bytes=benchmark.PASS_BYTES)
    rollout = benchmark.make_rollout(args)
    programs = {name: benchmark.placed(name, args, rollout) for name in benchmark.PLACEMENTS}
    targets = {name: read() for name, (read, _) in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    before = {name: meter()["moved"] for name, (_, meter) in programs.items()}
    for _ in range(repeats := 3 if found.full else 1):
        for name, (read, _) in programs.items():
            times[name].append(once(read, device))
    for name, (_, meter) in programs.items():
        seconds, meters = statistics.median(times[name]), meter()
        found.note(f"{name}: time", 1e3 * seconds, "ms")
        found.note(f"{name}: on the device while it reads", meters["during"] / 1e9, "GB")
        if name == "none":
            found.at_least("none: deviation of the targets", float(targets[name].float().std()), 1e-3)
            continue
        found.equal(
            f"{name}: targets equal to those of none, bit for bit", torch.equal(targets[name], targets["none"]), True
        )
        over = statistics.median(a / b for a, b in zip(times[name], times["none"], strict=True))
        if name == "stream":
            found.at_most("stream: time over that of none", over, STREAMED, only_gpu=True)
            found.at_most("stream: share of none's memory", meters["during"] / programs["none"][1]()["during"], 0.6)
        else:
            found.note(f"{name}: time over that of none", over)
        if found.on_gpu:
            copying = (meters["moved"] - before[name]) / repeats / copied_from_host(found)
            found.note(f"{name}: time of its copies alone", 1e3 * copying, "ms")
