"""Picks the fused kernel where one exists and works, which a small random tile shows before any loss relies on it."""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.elementwise import Finish, Step, eager_
from trl_opsd.types import Sampled

_CLIP = 0.01
"""Clip of the trial, in nats."""
_TRIED = 3, 100
"""Rows and columns of the trial tile; the columns are no multiple of a block, so that masks are tested."""
_LIMIT = 1e-4
"""Largest difference from the eager steps that is rounding, relative to the largest number."""


def step_for(divergence: Divergence, clip: float | None, device: torch.device) -> Step:
    """The kernel for this divergence on this device, or the eager steps where none works."""
    # Triton's interpreter runs kernels on a CPU, for tests.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return eager_
    fused: Any = import_module("trl_opsd.losses.fused") if find_spec("triton") else None
    if (
        fused is None
        or type(divergence) not in fused.KERNELS
        or not _works(fused.fused_, divergence, clip is not None, device)
    ):
        return eager_
    step: Step = fused.fused_
    return step


@cache
def _works(step: Step, divergence: Divergence, clips: bool, device: torch.device) -> bool:
    """Whether the kernel is compiled here and gives the numbers of the eager steps; warns if not."""
    try:
        ours, expected = (_on_a_tile(one, divergence, _CLIP if clips else None, device) for one in (step, eager_))
    except Exception as error:
        # Compiling needs a C compiler and a device that Triton knows; whatever is missing, the eager steps work.
        found = f"failed with {type(error).__name__}: {error}"
    else:
        gap = max(_gap(one, other) for one, other in zip(ours, expected, strict=True))
        if gap <= _LIMIT:
            return True
        found = f"differs by {gap:.1e} from the same steps without it"
    warnings.warn(
        f"The Triton kernel of {divergence} {found}. The loss is computed without it, which is correct and slower.",
        stacklevel=2,
    )
    return False


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest number, of which all may be 0."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-9))


def _on_a_tile(
    step: Step, divergence: Divergence, clip: float | None, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Statistics and gradient of a small random tile."""
    rows, columns = _TRIED
    values = torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    student_RV, teacher_RV = values[..., :columns]
    plain, numbers_R = Finish(None, None), torch.arange(rows, device=device)
    sampled = Sampled(ids=numbers_R, pull=numbers_R - 1.0, logprobs=-1.0 - numbers_R)
    # The gradient is written in place of the student's logits, as in training.
    statistics = step(divergence, clip, (plain, plain), student_RV, teacher_RV, None, sampled, student_RV)
    return (*statistics, student_RV)
