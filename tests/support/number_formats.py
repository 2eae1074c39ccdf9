"""What weights become in 4 and 8 bits, by the definition of each format; knows nothing of torchao.

O output features · I input features
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()


def as_e4m3(value: Tensor) -> Tensor:
    """The nearest number with a mantissa of 3 bits and exponents from -6."""
    step = 2.0 ** (value.abs().clamp(min=2**-6).log2().floor() - 3)
    return ((value / step).round() * step).clamp(-448, 448)


def quantised(weight_OI: Tensor, kind: str) -> Tensor:
    """[O, I] in float64, by the definition of each format, whose scales are float32."""
    if kind in ("int4", "int8"):
        most, size = (7, 32) if kind == "int4" else (127, weight_OI.size(1))
        parts = weight_OI.view(len(weight_OI), -1, size)
        scale = parts.abs().amax(-1, keepdim=True) / (most + 0.5)
        # The largest of a group lies between two integers: which of them it becomes is a matter of float32.
        return ((parts * (1 / scale)).round().clamp(-most - 1, most).double() * scale).view_as(weight_OI)
    if kind == "fp8":
        scale = (weight_OI.abs().amax(1, keepdim=True) / 448).double()
        return as_e4m3(weight_OI.double() / scale) * scale
    whole_scale = (weight_OI.abs().amax() / (448 * 6)).double()
    parts = weight_OI.double().view(len(weight_OI), -1, 16)
    scale = as_e4m3(parts.abs().amax(-1, keepdim=True) / 6 / whole_scale) * whole_scale
    nearest = (parts.abs() / scale).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    return (E2M1[nearest] * parts.sign() * scale).view_as(weight_OI)
