"""Models of a loss by their logits: sides that have given ones, sides with other heads, and logits in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trl_opsd.losses import LazyLogits, OutputHead


def of_logits(logits_NV: Tensor, temperature: float = 1.0) -> LazyLogits:
    """A model with these logits, before the temperature."""
    return LazyLogits(logits_NV, OutputHead(torch.eye(logits_NV.size(-1), dtype=logits_NV.dtype)), temperature)


def logits_of(model: LazyLogits, hidden_NH: Tensor | None = None) -> Tensor:
    """[N, V], a model's logits in float64, also of other hidden states."""
    head, hidden_NH = model.head, model.hidden if hidden_NH is None else hidden_NH
    logits_NV = hidden_NH.double() @ head.weight.double().T
    logits_NV = head.scale * (logits_NV if head.bias is None else logits_NV + head.bias.double())
    if head.softcap is not None:
        logits_NV = head.softcap * (logits_NV / head.softcap).tanh()
    return logits_NV / model.temperature


def excluding(model: LazyLogits, columns: Sequence[int]) -> LazyLogits:
    """With a bias that excludes some tokens."""
    bias = torch.zeros(len(model.head.weight)).index_fill(0, torch.tensor([*columns]), -torch.inf)
    return replace(model, head=replace(model.head, bias=bias))


def lower(model: LazyLogits, dtype: torch.dtype) -> LazyLogits:
    """In another precision."""
    weight, bias = (None if one is None else one.to(dtype) for one in (model.head.weight, model.head.bias))
    return replace(model, hidden=model.hidden.to(dtype), head=replace(model.head, weight=weight, bias=bias))
