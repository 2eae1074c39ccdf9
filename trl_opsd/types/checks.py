"""Refuses what a user's own teacher or `compare` returns, if its shapes or values do not fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trl_opsd.types import LossParts, Rollout, TeacherTargets


def check_targets(targets: Any, rollout: Rollout, where: str, width: int | None = None) -> None:
    """Raises `ValueError` unless targets belong to the rows and tokens of a rollout, and are `width` wide where known.

    They are [`~types.TeacherTargets`] with floats of shape [B, C, H], or with a state for each token that may count.
    """
    rows, tokens = rollout.completion_ids.shape
    got = "None" if targets is None else f"a {type(targets).__name__}"
    if isinstance(targets, TeacherTargets) and targets.rows is not None:
        widths = {row.hidden.size(1) for row in targets.rows}
        got = f"`TeacherTargets` of {len(targets.rows)} rows of {targets.tokens} tokens, {max(widths, default=0)} wide,"
        if len(targets.rows) == rows and targets.tokens == tokens and (width is None or widths == {width}):
            if not (missing := _missing(targets, rollout)):
                return
            got += f" without states for {missing} of the tokens that may count"
    elif isinstance(targets, TeacherTargets):
        hidden = targets.hidden
        got = f"`TeacherTargets` of a {type(hidden).__name__}"
        if isinstance(hidden, Tensor):
            as_expected = hidden.shape[:2] == (rows, tokens) and hidden.ndim == 3 and width in (None, hidden.size(2))
            if as_expected and hidden.is_floating_point():
                return
            got = f"`TeacherTargets` of shape {list(hidden.shape)} in {hidden.dtype}"
    raise ValueError(
        f"`{where}` returned {got}: expected `TeacherTargets(hidden=...)` of shape [{rows}, {tokens}, {width or 'H'}] "
        "of floats: for each token of each completion the state that predicts it, as wide as the teacher's head."
    )


def _missing(targets: TeacherTargets, rollout: Rollout) -> int:
    """How many tokens that may count have no state. Waits for the weights."""
    assert targets.rows is not None
    lacking_BC = rollout.weights.cpu() != 0
    for lacking_C, row in zip(lacking_BC, targets.rows, strict=True):
        lacking_C[row.places] = False
    return int(lacking_BC.sum())


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
