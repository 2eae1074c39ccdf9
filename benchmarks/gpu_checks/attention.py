"""Attention over ragged rows: no mask where padding follows a row, the fast kernel, and rows packed into one."""

from __future__ import annotations

import argparse
from dataclasses import replace

import teacher as benchmark
import torch
from timing import median
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_checks.findings import Findings
from trl_opsd.models.backbone import completion_hidden
from trl_opsd.models.padding import PADDED
from trl_opsd.types import Rollout

MASKED = 0.8
"""Time without a mask over that with one. 32,768 tokens of 0.36e9 weights take 39 ms at 600 TFLOP/s; attention 7 ms in
the flash kernel (2.9e12 operations at 400), and 45 with a mask (twice as many, at 130): 46 / 84 are 0.55."""


def attention(found: Findings) -> None:
    device = torch.device(found.device)
    shape = {"model": "0.5B", "layers": 24, "rows": 16, "length": 2048, "dtype": torch.bfloat16}
    if not found.full:
        shape = {"model": "small", "layers": 1, "rows": 4, "length": 32, "dtype": torch.float32}
    args = argparse.Namespace(**shape, device=device)
    model, rollout = benchmark.make_model(args), ragged(args)
    plain, masked = replace(PADDED, needs_mask=False), replace(PADDED, needs_mask=True)
    readings = {"without a mask": plain, "with a mask": masked, "packed": replace(PADDED, packed=True)}
    states, seconds = {}, {}
    for name, reading in readings.items():
        with torch.no_grad():
            states[name] = completion_hidden(model, rollout, reading)
            run = lambda reading=reading: completion_hidden(model, rollout, reading)  # noqa: E731
            seconds[name] = median(run, device, repeats=5 if found.full else 1)
        found.note(f"ragged rows, {name}: time of a pass", 1e3 * seconds[name], "ms")
    if device.type == "cuda":
        try:  # it takes no mask
            with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                completion_hidden(model, rollout, plain)
            ended = "it ran"
        except RuntimeError as error:  # no kernel
            ended = str(error)[:80]
        found.equal("ragged rows without a mask: the flash kernel alone", ended, "it ran")
    else:
        found.skip("the flash kernel", "it is CUDA's")
    counts_BC = rollout.weights != 0
    for name in ("with a mask", "packed"):
        gap = (states[name][counts_BC] - states["without a mask"][counts_BC]).float().norm()
        gap = float(gap / states["without a mask"][counts_BC].float().norm())
        found.at_most(f"{name}: difference of the states", gap, 2e-2 if found.full else 1e-5)
    ratio = seconds["without a mask"] / seconds["with a mask"]
    found.at_most("time without a mask over that with one", ratio, MASKED, only_gpu=True)


def ragged(args: argparse.Namespace) -> Rollout:
    """Rows of which the shortest is an eighth of the longest, half prompt and half completion."""
    rollout = benchmark.make_rollout(args)
    half = args.length // 2
    lengths_B1 = torch.linspace(half / 8, half, args.rows).int().to(args.device)[:, None]
    places_P = torch.arange(half, device=args.device)
    mask_BC = (places_P < lengths_B1).to(rollout.completion_mask)
    prompt_BP = (places_P >= half - lengths_B1).to(rollout.prompt_mask)
    return replace(rollout, prompt_mask=prompt_BP, completion_mask=mask_BC, weights=mask_BC.float())
