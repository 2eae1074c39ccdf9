"""What copies and products reach at best on this device: the ceilings that other checks are compared with."""

from __future__ import annotations

import torch
from timing import median

from gpu_checks.findings import Findings


def machine(found: Findings) -> None:
    """What there is. A process that cannot use the GPU ends here."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    found.note("torch", torch.__version__)
    found.note("bytes", gpu and gpu.total_memory)
    found.note("gpu", gpu and gpu.name)


def ceilings(found: Findings) -> None:
    if found.on_gpu:
        free, total = torch.accelerator.get_memory_info()
        found.at_least("share of the GPU's memory that is free at the start", free / total, 0.9)
    found.note("copied on the device, read and written", copied(found) / 1e9, "GB/s")
    found.note("products in bfloat16", multiplied(found, torch.bfloat16) / 1e12, "TFLOP/s")
    found.note("products in float32", multiplied(found, torch.float32) / 1e12, "TFLOP/s")
    if found.on_gpu:
        found.note("copied from pinned host memory", copied_from_host(found) / 1e9, "GB/s")
    else:
        found.skip("copied from pinned host memory", "memory is pinned for a GPU only")


def copied(found: Findings) -> float:
    """Bytes read and written in a second."""
    device = torch.device(found.device)
    source = torch.ones(1 << (29 if found.full else 22), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(lambda: target.copy_(source), device, repeats=10, warm_ups=3)


def multiplied(found: Findings, dtype: torch.dtype) -> float:
    """Operations of square products in a second, long enough that the clock of the GPU settles."""
    device, (size, times) = torch.device(found.device), (8192, 10) if found.full else (256, 1)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return times * 2 * size**3 / median(run, device, repeats=5, warm_ups=2)


def copied_from_host(found: Findings) -> float:
    """Bytes in a second."""
    device = torch.device(found.device)
    host = torch.empty(1 << (30 if found.full else 20), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    return host.nbytes / median(lambda: target.copy_(host, non_blocking=True), device, repeats=5, warm_ups=2)
