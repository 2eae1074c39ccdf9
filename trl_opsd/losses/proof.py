"""Compares what a divergence of the user's own computes with its definition, on random distributions.

R rows (tokens) · V vocabulary size
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from trl_opsd.losses.divergence import Divergence

_Compute: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_ROWS = 3
_TOLERANCE = 1e-3
"""Largest difference, relative to the largest number: rounding in float32 stays far below it."""
ROUNDING = 1e-6
"""What rounding leaves of 0."""


def is_ours(divergence: Divergence) -> bool:
    """Whether a divergence is one of this package's own, and not of a class derived from one."""
    return type(divergence).__module__ == Divergence.__module__


def prove_divergence(divergence: Divergence, vocabulary: int, device: torch.device) -> float:
    """Checks that the gradient is that of the value, and that the value of a token depends on that token alone.

    The package's own divergences are not checked. One that is random is checked for finite numbers only.

    Args:
        divergence ([`Divergence`]):
            The divergence. Draws random numbers if it does.
        vocabulary (`int`):
            V.
        device (`torch.device`):
            Where it will be computed.

    Returns:
        `float`: The smallest value, in nats; no divergence is below 0.

    Raises:
        ValueError: One of the two does not hold; or a number is not finite, although all probabilities are positive.
    """
    kind = type(divergence)
    if is_ours(divergence):
        return 0.0
    logits = 3 * torch.randn(2, _ROWS, vocabulary, generator=torch.Generator().manual_seed(0))
    logs_2RV = logits.to(device).log_softmax(-1)

    def computed(by: _Compute, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        logs_2rV = logs_2RV[:, rows].clone()
        return by(*logs_2rV, *logs_2rV.exp())

    defined = partial(Divergence.value_and_gradient, divergence)
    by_autograd, again = computed(defined), computed(defined)
    for what, found in zip(("value", "gradient"), by_autograd, strict=True):
        if not found.isfinite().all():
            raise ValueError(
                f"The {what} of `{kind.__name__}.value` is NaN or infinite for distributions without a probability of "
                "0: look for roots, logarithms and quotients in it, also in a branch that `where` does not take."
            )
    least = float(by_autograd[0].min())
    if _gap(by_autograd, again):  # it is random
        return least
    alone, first = computed(defined, slice(1)), (by_autograd[0][:1], by_autograd[1][:1])
    if gap := _gap(alone, first):
        raise ValueError(
            f"`{kind.__name__}.value` of a token depends on the other tokens, {gap}. Tokens are compared a few at a "
            "time, so compute nothing over the first dimension."
        )
    if gap := _gap(computed(divergence.value_and_gradient), by_autograd):
        value_from, gradient_from = (
            next(one for one in kind.__mro__ if name in vars(one)) for name in ("value", "value_and_gradient")
        )
        if value_from is not gradient_from and issubclass(value_from, gradient_from):
            raise ValueError(
                f"`{kind.__name__}` has a `value` of its own, but the loss is computed by the `value_and_gradient` of "
                f"`{gradient_from.__name__}`, which is something else, {gap}. Derive it from `Divergence`, and its "
                "gradient is computed by autograd; or override both."
            )
        raise ValueError(
            f"`{kind.__name__}.value_and_gradient` does not belong to `{kind.__name__}.value`, {gap}. It returns the "
            "value and its gradient with respect to the logits; leave it out, and autograd computes that. If another "
            "gradient is meant, write a `value` that has it, with `detach`."
        )
    return least


def _gap(some: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> str:
    """In words, how far values and gradients are from others; empty if they are equal up to rounding."""
    for what, one, other in zip(("values", "gradients"), some, others, strict=True):
        if one.shape != other.shape:
            return f"{what} of shape {list(one.shape)} and not {list(other.shape)}"
        gap, largest = float((one - other).abs().max()), float(other.abs().max())
        if not gap <= _TOLERANCE * largest + ROUNDING:
            return f"{what} differ by {gap:.2g} where the largest is {largest:.2g}"
    return ""
