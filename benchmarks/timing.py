"""Seconds of a program on a device, by CUDA's events where it has them, else by the clock; and what it allocates."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

Name = TypeVar("Name", bound=Hashable)


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


def in_turns(
    programs: Mapping[Name, Callable[[], Any]], device: torch.device, repeats: int, warm_ups: int = 1
) -> dict[Name, list[float]]:
    """Seconds of each of `repeats` runs of several programs, which take turns, after warm-ups."""
    rounds = [{name: once(run, device) for name, run in programs.items()} for _ in range(warm_ups + repeats)]
    return {name: [one[name] for one in rounds[warm_ups:]] for name in programs}


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of runs of the same turn."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def allocated(run: Callable[[], Any], device: torch.device) -> int:
    """Peak of the bytes that a run allocates on a device."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        return torch.accelerator.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def busy(profiler: Any, kind: str = "CUDA") -> float | None:
    """Seconds in which at least one kernel or copy runs on a device, or `None` if the profiler saw none."""
    events = profiler.profiler.kineto_results.events()
    seen = [one for one in events if one.device_type().name == kind and not one.is_user_annotation()]
    total = end = 0
    for begin, size in sorted((one.start_ns(), one.duration_ns()) for one in seen):
        total += max(begin + size - max(begin, end), 0)
        end = max(end, begin + size)
    return total / 1e9 if seen else None
