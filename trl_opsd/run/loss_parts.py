"""Validates the type and the shape of what a `compare` of the user's own returns; reads no value of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_opsd.types import LossParts, Rollout


def check_parts(parts: Any, rollout: Rollout, where: str, training: bool) -> None:
    """Checks that the parts of a loss belong to a micro-batch, and that a gradient can come from them.

    Args:
        parts (`Any`):
            What was returned for the micro-batch.
        rollout ([`~types.Rollout`]):
            Its B rows.
        where (`str`):
            The method that returned them, for the message.
        training (`bool`):
            Whether the model is in training mode; with gradients enabled, the loss then needs a graph.

    Raises:
        ValueError: They are not a [`~types.LossParts`] with a scalar loss and rows of shape [B, columns].
    """
    columns = len(LossParts.ROW_NAMES)
    shapes = {"loss": (), "rows": (len(rollout.completion_ids), columns)}
    got = "None" if parts is None else f"a {type(parts).__name__}"
    if isinstance(parts, LossParts):
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
