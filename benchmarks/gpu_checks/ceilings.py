"""What copies and products reach at best on this device: the ceilings that other checks are compared with."""

from __future__ import annotations

import torch
from timing import median

from gpu_checks.findings import Findings


def ceilings(found: Findings) -> None:
    device = torch.device(found.device)
    if found.on_gpu:
        free, total = torch.cuda.mem_get_info()
        found.at_least("share of the GPU's memory that is free at the start", free / total, 0.9)
    found.note("copied on the device, read and written", copied(device) / 1e9, "GB/s")
    found.note("products in bfloat16", multiplied(device, torch.bfloat16) / 1e12, "TFLOP/s")
    found.note("products in float32", multiplied(device, torch.float32) / 1e12, "TFLOP/s")
    if found.on_gpu:
        found.note("copied from pinned host memory", copied_from_host(device) / 1e9, "GB/s")
    else:
        found.skip("copied from pinned host memory", "memory is pinned for a GPU only")


def copied(device: torch.device) -> float:
    """Bytes read and written in a second."""
    source = torch.ones(1 << (29 if device.type == "cuda" else 22), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(lambda: target.copy_(source), device, repeats=10, warm_ups=3)


def multiplied(device: torch.device, dtype: torch.dtype) -> float:
    """Operations of square products in a second, long enough that the clock of the GPU settles."""
    size, times = (8192, 10) if device.type == "cuda" else (256, 1)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return times * 2 * size**3 / median(run, device, repeats=5, warm_ups=2)


def copied_from_host(device: torch.device) -> float:
    """Bytes in a second."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    return host.nbytes / median(lambda: target.copy_(host, non_blocking=True), device, repeats=5, warm_ups=2)
