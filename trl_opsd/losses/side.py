"""One model in a loss: its hidden states and its head, and the two products with them.

N tokens · R rows of a block · C tokens of a tile · G tokens of a group · V vocabulary size · H hidden width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trl_opsd.losses.elementwise import Finish
from trl_opsd.types import LazyLogits

STRIDE_ELEMENTS = 64
"""Rows of logits are aligned to multiples of this: products have no fast kernel for unaligned rows, and models with
heads of 151936 and 152064 rows share 151665 ids."""


@dataclass(frozen=True, slots=True)
class Side:
    """One model's hidden states and head in the dtype of their products, with scale, temperature and cap folded in."""

    hidden_NH: Tensor
    weight_VH: Tensor
    gain: float
    """Multiplier of the product."""
    finish: Finish
    """What turns products into logits, its bias already multiplied by `gain`."""

    @classmethod
    def of(cls, lazy: LazyLogits, dtype: torch.dtype, vocabulary: int | None) -> Side:
        head, device = lazy.head, lazy.hidden.device  # a head in host memory is copied for this product alone
        # Scale and temperature cost nothing inside the product; below a cap the temperature has to be applied after it.
        gain = head.scale / (lazy.temperature if head.softcap is None else head.softcap)
        return cls(
            hidden_NH=operand(lazy.hidden, dtype),
            weight_VH=operand(head.weight[:vocabulary].to(device, non_blocking=True), dtype),
            gain=gain,
            finish=Finish(
                bias=None if head.bias is None else head.bias[:vocabulary].to(device).float() * gain,
                cap=None if head.softcap is None else head.softcap / lazy.temperature,
            ),
        )

    def project_(self, out_CV: Tensor, rows: slice, times: float = 1.0, carry: float = 0.0) -> None:
        """Writes `times` the product of these rows into the first rows of a tile, plus `carry` times what is there."""
        tile_CV = out_CV[: rows.stop - rows.start]
        addmm_(tile_CV, self.hidden_NH[rows], self.weight_VH.T, alpha=self.gain * times, beta=carry)

    def backproject_(
        self,
        gradient_GV: Tensor,
        rows: slice,
        hidden_NH: Tensor | None,
        weight_VH: Tensor | None,
        bias_V: Tensor | None,
        *,
        adds: bool = False,
    ) -> None:
        """Propagates the gradient of these rows' logits to hidden states, weight and bias, where given.

        It `adds` to what is there where groups share rows; else each row is in one, and the first one overwrites.
        """
        gradient_GV = gradient_GV[: rows.stop - rows.start]
        # The first group overwrites, so the head's gradient needs no zeroing.
        slope, carry = self.gain * (1.0 if self.finish.cap is None else self.finish.cap), float(adds or rows.start > 0)
        if hidden_NH is not None:
            addmm_(hidden_NH[rows], gradient_GV, self.weight_VH, alpha=slope, beta=float(adds))
        if weight_VH is not None:
            addmm_(weight_VH, gradient_GV.T, self.hidden_NH[rows], alpha=slope, beta=carry)
        if bias_V is not None:
            sum_V = gradient_GV.sum(0, dtype=torch.float32)
            if adds:
                bias_V.add_(sum_V, alpha=slope)
            else:
                bias_V.copy_(sum_V.mul_(slope).add_(bias_V) if carry else sum_V.mul_(slope))


def addmm_(total: Tensor, a: Tensor, b: Tensor, *, alpha: float, beta: float) -> None:
    """`total = beta * total + alpha * a @ b` in float32, without rounding the product to the factors' dtype first."""
    if a.dtype == torch.float32:
        total.addmm_(a, b, alpha=alpha, beta=beta)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, alpha=alpha, beta=beta, out=total)


def operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor in the dtype it is multiplied in: only CUDA has low-precision products with float32 output."""
    tensor = tensor.detach().to(dtype)
    # Elsewhere the factor is rounded as autocast would, and multiplied in float32.
    return tensor if tensor.is_cuda and dtype in (torch.float16, torch.bfloat16) else tensor.float()


def product_dtype(side: LazyLogits) -> torch.dtype:
    kind = side.hidden.device.type
    # Products with `out` are not autocast, so its dtype is applied here.
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(side.hidden.dtype, side.head.weight.dtype)
