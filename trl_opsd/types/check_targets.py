"""Validates the type and the shape of a teacher's targets; knows neither teachers nor trainers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trl_opsd.types import Rollout, TeacherTargets


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
