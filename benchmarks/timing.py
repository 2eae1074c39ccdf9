"""Seconds of a program on a device: by CUDA's events where it has them, else by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def once(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run, until the device is done."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def median(run: Callable[[], Any], device: torch.device, repeats: int, warm_ups: int = 1) -> float:
    """Median seconds of `repeats` runs, after warm-ups."""
    return statistics.median([once(run, device) for _ in range(warm_ups + repeats)][warm_ups:])
