"""Validates type and shape of what a user's `compare` returns; reads no values, which would wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_opsd.types import LossParts, Rollout


def check_parts(parts: Any, rollout: Rollout, where: str, training: bool) -> None:
    """Rejects parts of a loss that do not fit the rollout's rows, or that in training have no graph."""
    columns = len(LossParts.ROW_NAMES)
    shapes = {"loss": (), "rows": (len(rollout.completion_ids), columns)}
    got = "None" if parts is None else f"a {type(parts).__name__}"
    if isinstance(parts, LossParts):
        # Dtype and shape are known on the host; values are not.
        wrong = [name for name, shape in shapes.items() if not _is_float(getattr(parts, name), shape)]
        if not wrong and training and torch.is_grad_enabled() and not parts.loss.requires_grad:
            raise ValueError(
                f"`{where}` returned a loss without a graph, from which no gradient comes: compute it from the "
                "student, without `detach`, `no_grad` or `float`."
            )
        if not wrong:
            return
        value = getattr(parts, wrong[0])
        shown = f"of shape {list(value.shape)} in {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        got = f"`LossParts` with `{wrong[0]}`: {shown}"
    raise ValueError(
        f"`{where}` returned {got}: expected `LossParts(loss=..., rows=...)` with a loss of shape [], divided by "
        f"`num_items`, and rows of shape {list(shapes['rows'])}, both of floats: for each row the sums "
        f"{', '.join(LossParts.ROW_NAMES)}."
    )


def _is_float(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.is_floating_point()
