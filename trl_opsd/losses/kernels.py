"""Which step a device takes: a Triton kernel, where one compiles and gives the numbers of the eager steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence
from trl_opsd.losses.elementwise import Finish, Step, eager_
from trl_opsd.types import Sampled

_CLIP = 0.01
"""Clip of the trial, in nats."""
_TRIED = 3, 100
"""Rows and columns of the trial tile; the columns are no multiple of a block, so that masks are tested."""
_LIMIT = 1e-4
"""Largest difference from the eager steps that is rounding, relative to the largest number."""


def kernels(device: torch.device) -> Any:
    """The module of the kernels, or `None` where none can work on this device."""
    # Triton's interpreter runs kernels on a CPU, for tests.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    return import_module("trl_opsd.losses.fused") if find_spec("triton") else None


def step_for(divergence: Divergence, clip: float | None, device: torch.device) -> Step:
    """The kernel for this divergence on this device, or the eager steps where none works."""
    fused = kernels(device)
    known = fused is not None and type(divergence) in fused.KERNELS
    step: Step = fused.fused_ if known and _works(fused.fused_, divergence, clip is not None, device) else eager_
    return step


@cache
def _works(step: Step, divergence: Divergence, clips: bool, device: torch.device) -> bool:
    run = partial(_on_a_tile, divergence=divergence, clip=_CLIP if clips else None, device=device)
    return agree(run, step, eager_, f"{divergence}")


def agree(run: Callable[[Any], Sequence[Tensor]], kernel: Any, eager: Any, name: str) -> bool:
    """Whether a kernel is compiled here and gives the numbers of its eager equivalent in a trial; warns if not."""
    try:
        ours, expected = run(kernel), run(eager)
    except Exception as error:
        # Compiling needs a C compiler and a device that Triton knows; whatever is missing, the eager steps work.
        found = f"failed with {type(error).__name__}: {error}"
    else:
        # Relative to the largest number; all may be 0.
        pairs = zip(ours, expected, strict=True)
        gap = max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-9)) for one, other in pairs)
        if gap <= _LIMIT:
            return True
        found = f"differs by {gap:.1e} from the computation without it"
    warnings.warn(
        f"The Triton kernel of {name} {found}. The loss is computed without it, which is correct but slower.",
        stacklevel=2,
    )
    return False


def _on_a_tile(
    step: Step, divergence: Divergence, clip: float | None, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Statistics and gradient of a small random tile."""
    rows, columns = _TRIED
    values = torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(0)).mul_(3).to(device)
    student_RV, teacher_RV = values[..., :columns]
    plain, numbers_R = Finish(None, None), torch.arange(rows, device=device)
    sampled = Sampled(ids=numbers_R, nll_weight=numbers_R - 1.0, logprobs=-1.0 - numbers_R)
    # The gradient is written in place of the student's logits, as in training.
    statistics = step(divergence, clip, (plain, plain), student_RV, teacher_RV, None, sampled, student_RV)
    return (*statistics, student_RV)
